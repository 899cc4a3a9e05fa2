"""How many rollouts per CPU second `bench train convert` handles (chat rows, grpo groups).

A synthetic job of rollouts with 10 calls and about 52 kB of calls each is converted; the
baseline, in the same run, is the standard library's `json` parsing the same bytes once.

    python benchmarks/convert.py [--rollouts 2000]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from benchflow.kernel.storage import dumps
from benchflow.training.convert import convert, make_options

CALLS = 10
TARGET_BYTES = 52_000


def calls_of(name: str) -> bytes:
    """Ten calls of one growing conversation with exact tokens."""
    filler = "x" * 220
    messages = [{"role": "system", "content": filler}, {"role": "user", "content": "Fit the data."}]
    prompt = list(range(100, 160))
    lines = []
    for index in range(CALLS):
        function = {"name": "bash", "arguments": '{"command": "ls"}'}
        tool_call = {"id": f"c{index}", "type": "function", "function": function}
        reply = {"role": "assistant", "content": filler, "tool_calls": [tool_call]}
        sampled = [1000 + index] * 24
        capture = {
            "schema_version": 1,
            "provider": "vllm",
            "requested": True,
            "prompt_token_ids": prompt,
            "completions": [{"index": 0, "token_ids": sampled, "logprobs": [-0.123456] * len(sampled)}],
            "unavailable": {},
        }
        body = {"choices": [{"index": 0, "message": reply, "finish_reason": "tool_calls"}]}
        lines.append(
            dumps(
                {
                    "schema_version": 1,
                    "index": index,
                    "rollout": name,
                    "node_id": "n1",
                    "request": {
                        "ts": "2026-01-01T00:00:00Z",
                        "method": "POST",
                        "path": "/v1/chat/completions",
                        "headers": {},
                        "body": {"model": "m", "messages": messages},
                    },
                    "response": {
                        "ts": "2026-01-01T00:00:01Z",
                        "status_code": 200,
                        "headers": {},
                        "body": body,
                    },
                    "duration_ms": 5.0,
                    "metadata": {"dialect": "chat", "purpose": "agent", "token_capture": capture},
                }
            )
        )
        messages = [*messages, reply, {"role": "tool", "tool_call_id": f"c{index}", "content": filler}]
        prompt = prompt + sampled + [7] * 20
    return b"\n".join(lines) + b"\n"


def make_job(root: Path, rollouts: int) -> int:
    """Write the job; returns the bytes of calls in it."""
    size = 0
    plans: dict[Path, list[dict[str, object]]] = {}
    for number in range(rollouts):
        name = f"task{number // 8}__{number:08x}"
        folder = root / f"trial-{number % 8 + 1:02d}" / "job" / name
        (folder / "trajectory").mkdir(parents=True)
        calls = calls_of(name)
        size += len(calls)
        (folder / "trajectory" / "llm_trajectory.jsonl").write_bytes(calls)
        result = {
            "schema_version": 1,
            "task_name": f"task{number // 8}",
            "task_digest": "sha256:1",
            "rollout_name": name,
            "trial": number % 8 + 1,
            "group_id": f"group-{number // 8}",
            "job": "job",
            "agent": "mini",
            "model": "vllm/policy",
            "rewards": {"reward": float(number % 3 == 0)},
            "outcome": "passed" if number % 3 == 0 else "failed",
            "attribution": {"verdict": "score", "reason": "verified"},
            "agent_result": {"usage_details": {"calls": CALLS, "failed_calls": 0}},
            "finished_at": "2026-01-01T00:00:00Z",
        }
        (folder / "result.json").write_bytes(dumps(result, indent=True))
        plan = {"name": name, "task": f"task{number // 8}", "group_id": f"group-{number // 8}"}
        plans.setdefault(folder.parent, []).append(plan)
    for job, planned in plans.items():
        (job / "job.json").write_bytes(dumps({"schema_version": 1, "rollouts": planned}))
    return size


def parse_all(root: Path) -> float:
    """CPU seconds of `json.loads` over every call."""
    begin = time.process_time()
    for path in root.rglob("llm_trajectory.jsonl"):
        for line in path.read_bytes().splitlines():
            json.loads(line)
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=2000)
    rollouts = parser.parse_args().rollouts
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "jobs"
        size = make_job(root, rollouts)
        print(f"{rollouts} rollouts, {CALLS} calls and {size / rollouts / 1000:.0f} kB of calls each")
        baseline = parse_all(root)
        for name, options in (
            ("chat, grpo", make_options(advantage="grpo")),
            ("chat, plain", make_options()),
            ("tokens, grpo", make_options(format="tokens", advantage="grpo")),
        ):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            begin = time.process_time()
            report = convert(root, Path(folder) / "rows.jsonl", options)
            spent = time.process_time() - begin
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            print(
                f"{name:13} {rollouts / spent:6.0f} rollouts/CPU s, {report.rows_written} rows, "
                f"{spent / baseline:.2f} x json.loads of the calls, peak memory +{grown / 1024:.0f} MiB"
            )


if __name__ == "__main__":
    main()
