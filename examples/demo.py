"""The main job in one minute: a group of four scored rollouts, with advantages.

Runs on this machine alone: a scripted policy instead of a model, sandboxes made of Linux
namespaces instead of containers. Start it with ``make demo``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import benchflow as bf

HERE = Path(__file__).parent
JOBS = Path("jobs/demo")
GROUP = JOBS / "mini"


async def main() -> None:
    print("Four rollouts of one policy on one task, each in a sandbox of its own:\n")
    evaluation = bf.Evaluation(
        tasks_dir=HERE / "tasks" / "half-life",
        jobs_dir=JOBS,
        config=bf.EvaluationConfig(
            agent="mini",
            model=f"scripted/{HERE / 'policies' / 'half-life.yaml'}",
            sandbox="local",
            trials=4,
            concurrency=4,
        ),
    )
    ended = await evaluation.run()
    for result in ended.rollouts:
        took = result.timing.total
        print(f"  trial-{result.trial:02}  {result.outcome}  {result.n_tool_calls} tool calls  {took:.1f} s")

    print("\nWhat a trainer receives:\n")
    async for row in bf.stream_rollouts(GROUP, follow=False, group_size=4):
        reward, advantage = row["reward"], row["advantage"]
        tokens = sum(sum(segment["action_mask"]) for segment in row["segments"])
        print(f"  {row['rollout']}  reward {reward:.3f}  advantage {advantage:+.3f}  {tokens} sampled tokens")

    print(f"""
Files: {GROUP}
  each rollout has result.json, its exact tokens in trajectory/llm_trajectory.jsonl and the verifier's output

Next:
  bench train convert {GROUP} --out train/demo.jsonl --group-advantage grpo
  bench eval metrics {JOBS}
  bench run examples/tasks -a oracle --sandbox local -j 4
  (`bench` lives in .venv/bin; the pages under docs/ start with docs/quickstart.md)""")


if __name__ == "__main__":
    asyncio.run(main())
