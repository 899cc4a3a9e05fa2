"""Environment templates and which values are secret."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.contracts.errors import UsageError
from benchflow.kernel.env import looks_secret, resolve_env


def test_references_defaults_and_plain_values():
    values, secrets = resolve_env(
        {"A": "${HOST_A}", "B": "x-${MISSING:-fallback}", "C": "plain", "D": "${EMPTY:-}"},
        "task t",
        {"HOST_A": "from-the-host", "EMPTY": ""},
    )
    assert values == {"A": "from-the-host", "B": "x-fallback", "C": "plain", "D": ""}
    assert "from-the-host" in secrets and "plain" not in secrets


def test_every_missing_variable_is_named():
    with pytest.raises(UsageError, match="task t needs the environment variable ONE, TWO"):
        resolve_env({"A": "${TWO}", "B": "${ONE}"}, "task t", {})


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("API_KEY", "short", True),
        ("GITHUB_TOKEN", "x", True),
        ("PLAIN", "a1b2c3d4e5f6a7b8", True),
        ("MODE", "description", False),
        ("HOMEPAGE", "https://example.invalid/a1b2c3", False),
    ],
)
def test_what_looks_secret(name, value, secret):
    assert looks_secret(name, value) is secret


@given(
    st.dictionaries(
        st.from_regex(r"[A-Z]{1,8}", fullmatch=True), st.text(alphabet=st.characters(exclude_characters="$"))
    )
)
def test_text_without_references_is_untouched(template):
    assert resolve_env(template, "x", {})[0] == template


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("AWS", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", True),
        ("DB_PASS", "hunter", True),
        ("X", "correct horse battery", True),
        ("DATABASE", "postgres://app:hunter2@db/main", True),
        ("LEVEL", "high", False),
        ("MODE", "production", False),
        ("PORT", "8080", False),
        ("SCRIPT", "/data/scripts/play.yaml", False),
        ("BASE_URL", "https://example.invalid/v1", False),
    ],
)
def test_what_the_user_gives_is_secret_unless_it_is_ordinary(name, value, secret):
    """C54: masked by value, without masking ordinary words everywhere."""
    assert (value in resolve_env({name: value}, "--agent-env", given=True)[1]) is secret
