"""The exception tree is drawn, complete, builtin-compatible and picklable."""

import pickle

import pytest

from benchflow.contracts import errors


def all_errors(root=errors.BenchflowError):
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from all_errors(child)


ALL = sorted(set(all_errors()), key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", ALL)
def test_every_class_is_drawn_in_the_docstring(cls):
    assert cls.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("cls", ALL)
def test_every_error_survives_pickling(cls):
    error = cls("what went wrong", fix="do this")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls and str(copy) == "what went wrong (do this)" and copy.fix == "do this"


@pytest.mark.parametrize("cls", [c for c in ALL if issubclass(c, errors.RolloutError)])
def test_rollout_errors_say_how_they_count(cls):
    assert cls.attribution in ("score", "mask") and cls.category and cls.phase


def test_only_what_the_policy_earned_is_scored():
    scored = {
        cls.category for cls in ALL if issubclass(cls, errors.RolloutError) and cls.attribution == "score"
    }
    assert scored == {"timeout", "idle_timeout", "context_limit", "budget"}


@pytest.mark.parametrize(
    "category", ["endpoint", "endpoint_rejected", "budget", "context_limit", "never heard of"]
)
def test_gateway_failures_become_errors(category):
    error = errors.model_failure(category, "text")
    assert isinstance(error, errors.RolloutError)
    if category != "never heard of":
        assert error.category == category
