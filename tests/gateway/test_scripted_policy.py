"""Policy files: every mistake is one line with file, line and key."""

from __future__ import annotations

import pytest

from benchflow.contracts.errors import UsageError
from benchflow.gateway.scripted.policy import load_policy, parse_policy


def parse(text):
    return parse_policy(text, "p.yaml", "p")


def test_a_turn_is_one_alternative_or_several():
    policy = parse(
        """
        model: half
        context: 100
        version: 7
        turns:
          - say: hello
          - when: No such file
            choices:
              - {weight: 3, label: a, run: [ls, pwd], delay_ms: 20, finish: length}
              - {write: {path: /x, content: ""}, think: hm, usage: {prompt_tokens: 9}}
              - {fail: {status: 503, retry_after: 0.5, times: 2}}
              - {fail: {disconnect: true}}
        otherwise: {call: {name: finish, arguments: {ok: true}}}
        """
    )
    assert (policy.name, policy.context, policy.version) == ("half", 100, "7")
    first, second = policy.turns
    assert first.choices[0].say == "hello"
    run, write, fail, drop = second.choices
    assert second.when.search("bash: No such file or directory")
    assert [use.arguments["command"] for use in run.tools] == ["ls", "pwd"]
    assert (run.weight, run.delay_ms, run.finish) == (3.0, 20, "length")
    assert (write.think, dict(write.usage)) == ("hm", {"prompt_tokens": 9})
    assert (fail.fail.status, fail.fail.retry_after, fail.fail.times) == (503, 0.5, 2)
    assert drop.fail.disconnect
    assert policy.otherwise.choices[0].tools[0].name == "finish"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("turns: [", "p.yaml:1: "),
        ("turns:\n  - say: '\x7f'", "p.yaml:2: the character U+007F"),
        ("- say: x", "p.yaml:1: a scripted policy is a mapping"),
        ("model: x", "p.yaml:1: turns: field required"),
        ("turns: []", "p.yaml:1: turns: list should have at least 1 item"),
        ("turns: [hello]", "p.yaml:1: turns: input should be a valid dictionary"),
        ("turns:\n  - say: x\nsede: 1", "p.yaml:3: sede: unknown key; known: model"),
        ("turns:\n  - sya: x", "p.yaml:2: sya: unknown key"),
        ("turns:\n  - say: x\n    say: y", "p.yaml:3: say: the key appears twice"),
        ("turns:\n  - weight: 1", "p.yaml:2: turns: an alternative needs"),
        ("turns:\n  - say: yes", "p.yaml:2: say: input should be a valid string, not True"),
        ("turns:\n  - say: [x]", "p.yaml:2: say: input should be a valid string, not ['x']"),
        (
            "turns:\n  - say: x\n    weight: -1",
            "p.yaml:3: weight: input should be greater than or equal to 0, not -1",
        ),
        ("turns:\n  - say: x\n    weight: .nan", "p.yaml:3: weight: input should be a finite number"),
        ("turns:\n  - say: x\n    weight: 0", "p.yaml:2: turns: at least one weight"),
        ("turns:\n  - choices: []", "p.yaml:2: choices: list should have at least 1 item"),
        ("turns:\n  - when: '['\n    say: x", "p.yaml:2: when: input should be a valid regular expression"),
        ("turns:\n  - run: ''", "p.yaml:2: run: string should match pattern"),
        ("turns:\n  - write: /x", "p.yaml:2: write: input should be a valid dictionary"),
        ("turns:\n  - write: {path: /x}", "p.yaml:2: content: field required"),
        ("turns:\n  - write: {path: /x, content: '', text: y}", "p.yaml:2: text: unknown key; known: path"),
        ("turns:\n  - call: {arguments: {}}", "p.yaml:2: name: field required"),
        ("turns:\n  - fail: {status: 200}", "p.yaml:2: status: input should be greater than or equal to 400"),
        ("turns:\n  - fail: {times: 0}", "p.yaml:2: times: input should be greater than or equal to 1"),
        ("turns:\n  - say: x\n    finish: done", "p.yaml:3: finish: input should be 'stop', 'length' or"),
        (
            "turns: [{say: x}]\ncontext: many",
            "p.yaml:2: context: input should be a valid integer, not 'many'",
        ),
    ],
)
def test_mistakes_are_named_with_file_line_and_key(text, problem):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.message.startswith(problem)
    assert "\n" not in caught.value.message


def test_a_file_that_is_no_text_is_a_usage_error(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot read"):
        load_policy(path)
    with pytest.raises(UsageError, match="cannot read"):
        load_policy(tmp_path)
