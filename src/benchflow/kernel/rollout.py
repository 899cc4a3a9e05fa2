"""The life of one rollout.

    setup -> start -> install_agent -> (connect_as -> execute)* -> verify -> cleanup

Every phase is public, timed and cancellable, and leaves the record true if it is the
last one that ran. ``run()`` calls them in order; ``async with`` guarantees ``cleanup``.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from benchflow.contracts.agent import Agent, HostInstalled, Session, SessionContext, StopReason
from benchflow.contracts.config import Role, RolloutConfig
from benchflow.contracts.errors import (
    AgentError,
    AgentTimeoutError,
    BenchflowError,
    BudgetError,
    ContextLimitError,
    EndpointError,
    RolloutCancelled,
    RolloutError,
    SandboxLostError,
    UsageError,
    model_failure,
)
from benchflow.contracts.records import Result
from benchflow.contracts.reward import VerifyMode, VerifyRequest, VerifyResult
from benchflow.contracts.sandbox import ModelDoor, Mount, Sandbox, SandboxImage, SandboxSpec
from benchflow.contracts.task import Task
from benchflow.kernel import fold, requests
from benchflow.kernel.budget import AgentBudget
from benchflow.kernel.clock import Clock, utc_now
from benchflow.kernel.env import resolve_env
from benchflow.kernel.events import RolloutEvent
from benchflow.kernel.files import RolloutFiles, rollout_folder
from benchflow.kernel.models import ModelAccess
from benchflow.kernel.planes import Planes, open_planes_for
from benchflow.kernel.scenes import PlannedStep, compile_scenes
from benchflow.kernel.tree import NodeReward, Step, Tree


class Rollout:
    """One episode: a policy acts on a task in a sandbox until it stops, then is scored."""

    def __init__(
        self,
        config: RolloutConfig,
        planes: Planes,
        *,
        task: Task | None = None,
        on_event: Callable[[RolloutEvent], None] | None = None,
    ) -> None:
        self.config = config
        self.planes = planes
        self.tree = Tree.rooted()
        self.error: BenchflowError | None = None
        self.verdict: VerifyResult | None = None
        self.result: Result | None = None
        self.sandbox: Sandbox | None = None
        self.image: SandboxImage | None = None
        self.models = ModelAccess()
        self.n_tool_calls = 0
        self.n_prompts = 0
        self.stop_reason: str | None = None
        self.steps: list[PlannedStep] = []
        self._task = task
        self._on_event = on_event
        self._owns_planes = False
        self._clock = Clock()
        self._files: RolloutFiles | None = None
        self._agents: dict[str, Agent] = {}
        self._sessions: dict[str, Session] = {}
        self._closed_usage: list[Any] = []
        self._role: Role | None = None
        self._at = self.tree.root.id
        self._baseline: object | None = None
        self._budget = AgentBudget(None)
        self._task_env: dict[str, str] = {}
        self._cleanup: asyncio.Task[Result | None] | None = None

    @classmethod
    async def create(cls, config: RolloutConfig, planes: Planes | None = None) -> Rollout:
        """A rollout ready for its first phase. Without ``planes`` it opens its own, and
        ``cleanup`` closes them."""
        rollout = cls(config, planes or await open_planes_for(config))
        rollout._owns_planes = planes is None
        return rollout

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.cleanup()

    async def run(self) -> Result:
        """All phases. A failure becomes part of the result; only usage errors, missing
        prerequisites (before anything was written) and cancellation are raised."""
        try:
            await self.setup()
            await self.start()
            await self.install_agent()
            for step in self.steps:
                await self.connect_as(step.role, fresh=step.new_session)
                await self.execute([step.prompt], scene=step.scene)
            await self.disconnect()
        except RolloutError:
            pass  # noted by the phase it happened in
        except BaseException:
            await self.cleanup()
            raise
        try:
            if not self.config.skip_verify and self._worth_verifying():
                await self.verify()
        except RolloutError:
            pass
        finally:
            await self.cleanup()
        assert self.result is not None
        return self.result

    # -- phases ---------------------------------------------------------------------

    async def setup(self) -> None:
        """Read the task, resolve roles and environment, make the folder. Nothing is written
        when the request itself is wrong."""
        if self._files is not None:
            raise UsageError("setup() was called already", fix="one Rollout is one run; create another")
        with self._phase("setup", "other"):
            task = self._task or self.planes.load_task(Path(self.config.task_path))
            self._task = task
            self.steps = compile_scenes(self.config.resolved_scenes(), task.instruction)
            for role in self.config.roles:
                if role.agent not in self._agents:
                    self._agents[role.agent] = self.planes.load_agent(role.agent)
                self._check_role(role, task)
            self._task_env, secrets = resolve_env(task.env, f"task {task.name}")
            self.planes.redact.add(*secrets)
            asked = self.config.agent_timeout
            self._budget = AgentBudget(task.agent_timeout_sec if asked is None else asked, self._excused)
            self._files = RolloutFiles(rollout_folder(self.config, task), self.planes.redact)
            self._files.write("prompts.json", [step.prompt for step in self.steps])

    async def start(self) -> None:
        """Prepare the image, open the way to the model, start the sandbox, and write
        ``config.json``: what was asked and, if it started, what is enforced."""
        if self.sandbox is not None:
            raise UsageError("start() was called already", fix="one Rollout is one run; create another")
        provider, task, files = self.planes.provider, self.task, self.files
        try:
            with self._phase("install", "agent_setup"):
                mounts = await self._prepare_agents()
            with self._phase("image", "image"):
                async with self.planes.image_gate:
                    source = requests.image_source(
                        task, self.config.local_base, self.config.base_image_override
                    )
                    self.image = await provider.prepare(source)
            with self._phase("start", "sandbox_start"):
                await self._open_routes()
                self.sandbox = await provider.create(self.image, self._spec(self.image, mounts))
                if self.config.hardening and not self.config.skip_verify:
                    self._baseline = await self.planes.reward.baseline(task, self.sandbox, self.workspace)
        finally:
            files.write("config.json", fold.config_record(self.config, task, self._agents, self.sandbox))

    async def install_agent(self) -> None:
        """Make each agent ready inside the sandbox."""
        sandbox = self.live
        with self._phase("install", "agent_setup"):
            for agent in self._agents.values():
                await agent.install(sandbox)

    async def connect(self) -> None:
        """Open the session of the first role."""
        await self.connect_as(self.steps[0].role if self.steps else self.config.roles[0])

    async def connect_as(self, role: Role, *, fresh: bool = False) -> None:
        """Open, or with ``fresh=False`` reuse, the session of ``role``."""
        sandbox = self.live
        if role.agent not in self._agents:
            raise UsageError(
                f"no role of this rollout has the agent {role.agent!r}",
                fix=f"one of {', '.join(self._agents)}",
            )
        self._role = role
        if fresh:
            await self._close_session(role.name)
        if role.name not in self._sessions:
            with self._phase("connect", "agent_setup"):
                agent = self._agents[role.agent]
                self._sessions[role.name] = await agent.connect(sandbox, self._context(role, agent))

    async def execute(self, prompts: Sequence[str] | None = None, *, scene: str = "main") -> None:
        """Send prompts to the connected role, one step each. ``None`` sends the instruction."""
        role, session = self._role, self._sessions.get(self._role.name if self._role else "")
        if role is None or session is None:
            raise UsageError("execute() needs a connected role", fix="call connect() first")
        for prompt in prompts if prompts is not None else (self.task.instruction,):
            with self._phase("agent", "agent_execution"):
                await self._step(role, session, prompt, scene)

    async def disconnect(self) -> None:
        """Close every session."""
        with self._phase("disconnect", "agent_setup"):
            for name in list(self._sessions):
                await self._close_session(name)

    async def verify(self) -> VerifyResult:
        """Score the current node. A verifier's own fault is in the result, not raised."""
        _ = self.live  # before the phase: a wrong order is the caller's mistake, not the rollout's end
        with self._phase("verify", "verifier"):
            async with self.planes.verify_gate:
                self.verdict = await self.planes.reward.score(self._verify_request())
            self.files.reward(self.verdict)
            self.tree.add_reward(NodeReward(self._at, self.verdict.reward, "verifier"))
            await self._collect_artifacts()
        return self.verdict

    async def cleanup(self) -> Result | None:
        """Tear down and write ``result.json``. Runs to its end also when cancelled, and raises
        the cancellation then; calling it twice is harmless."""
        if self._cleanup is None:
            self._cleanup = asyncio.create_task(self._clean())
        cancelled = False
        while not self._cleanup.done():
            try:
                await asyncio.shield(self._cleanup)
            except asyncio.CancelledError:
                cancelled = True
        result = self._cleanup.result()
        if cancelled:
            raise asyncio.CancelledError
        return result

    # -- what phases need -----------------------------------------------------------

    @property
    def task(self) -> Task:
        if self._task is None:
            raise UsageError("this rollout has no task yet", fix="call setup() first")
        return self._task

    @property
    def files(self) -> RolloutFiles:
        if self._files is None:
            raise UsageError("this rollout has no folder yet", fix="call setup() first")
        return self._files

    @property
    def live(self) -> Sandbox:
        if self.sandbox is None:
            raise UsageError("this rollout has no sandbox yet", fix="call start() first")
        return self.sandbox

    @property
    def workspace(self) -> str:
        """The agent's folder inside."""
        return requests.workspace(self.task, self.image.workdir if self.image else None)

    def _check_role(self, role: Role, task: Task) -> None:
        needs_model = self._agents[role.agent].capabilities().needs_model
        if needs_model and not role.model:
            raise UsageError(f"agent {role.agent!r} needs a model", fix="add -m provider/name")
        if role.agent == "oracle" and task.oracle is None:
            raise UsageError(f"task {task.name!r} has no reference solution", fix="add oracle/solve.sh")

    def _agent_user(self) -> str | None:
        return requests.agent_user(self.task, self.config)

    def _spec(self, image: SandboxImage, mounts: tuple[Mount, ...]) -> SandboxSpec:
        inside = any(agent.capabilities().runs_inside for agent in self._agents.values())
        route = self.models.door if inside else None
        door = ModelDoor(route.socket, route.inside_port) if route else None
        return SandboxSpec(
            name=self.files.folder.name,
            job=self.config.job,
            limits=self.task.limits,
            network=self.task.network,
            env=self._task_env,
            workdir=self.workspace,
            agent_user=self._agent_user(),
            mounts=mounts,
            model_door=door,
            setup_timeout=self.config.sandbox_setup_timeout,
        )

    async def _prepare_agents(self) -> tuple[Mount, ...]:
        installed = [agent for agent in self._agents.values() if isinstance(agent, HostInstalled)]
        return tuple([mount for agent in installed for mount in await agent.prepare()])

    async def _open_routes(self) -> None:
        wanted = [role.model for role in self.config.roles if role.model and self._speaks_to_models(role)]
        await self.models.open(
            self.planes.gateway,
            wanted,
            self.config,
            rollout=self.files.folder.name,
            calls=self.files.calls,
            task=self.task.name,
        )

    def _speaks_to_models(self, role: Role) -> bool:
        can = self._agents[role.agent].capabilities()
        return can.needs_model or can.dialect is not None

    def _context(self, role: Role, agent: Agent) -> SessionContext:
        config, route = self.config, self.models.route(role.model)
        oracle = self.task.oracle if role.agent == "oracle" else None
        as_root = agent.capabilities().runs_as_root or config.sandbox_user is None
        env, secrets = resolve_env({**config.agent_env, **role.env}, f"agent {role.agent}", given=True)
        self.planes.redact.add(*secrets)
        oracle_env, oracle_secrets = resolve_env(oracle.env if oracle else {}, "the oracle")
        self.planes.redact.add(*oracle_secrets)
        return SessionContext(
            role=role.name,
            agent=role.agent,
            model=route.model if route else role.model,
            workspace=self.workspace,
            user=None if as_root else self._agent_user(),
            logs=self.files.folder / "agent",
            record=self._record,
            route=route,
            env=env,
            reasoning_effort=role.reasoning_effort,
            sampling=config.sampling,
            seed=config.seed,
            trial=config.trial,
            oracle=oracle.directory if oracle else None,
            oracle_target=oracle.target if oracle else "/oracle",
            oracle_command=oracle.command if oracle else "./solve.sh",
            oracle_env=oracle_env,
            redact=self.planes.redact,
            idle_timeout=config.agent_idle_timeout,
        )

    def _record(self, event: Mapping[str, object]) -> None:
        self.files.event(self.tree.next_id(), event)
        if event.get("kind") in ("tool_call", "tool_call_update"):
            self._emit("agent")

    async def _step(self, role: Role, session: Session, prompt: str, scene: str) -> None:
        """One prompt, one edge of the tree. The node is added also when the turn fails."""
        node_id, begin, started_at = self.tree.next_id(), time.monotonic(), utc_now()
        before = session.n_tool_calls
        self.models.set_node(node_id)
        index, self.n_prompts = self.n_prompts, self.n_prompts + 1
        reason: str | None = None
        try:
            stopped = await self._budget.run(session.prompt(prompt))
            reason = stopped.value
            self._raise_for_end(stopped)
        except RolloutError as error:
            cause = self._model_at_fault(error)
            reason = (cause or error).category
            if cause is None:
                raise
            raise cause from error
        finally:
            tool_calls = session.n_tool_calls - before
            self.n_tool_calls += tool_calls
            self.stop_reason = reason or "cancelled"
            took = round(time.monotonic() - begin, 6)
            step = Step(role.name, index, scene, self.stop_reason, tool_calls, started_at, took)
            self._at = self.tree.add(self._at, step).id
            if self.n_prompts < len(self.steps):  # the last step is written with its reward
                self.files.tree(self.tree)

    def _model_at_fault(self, error: RolloutError) -> RolloutError | None:
        """The model side's failure when that is why the agent broke off or waited to its end."""
        totals = self.models.totals()
        if totals is None or not isinstance(error, AgentError):
            return None
        if totals.failure is not None:
            return model_failure(*totals.failure)
        if isinstance(error, AgentTimeoutError) and totals.calls and not totals.answered_calls:
            return EndpointError("the model answered no call within the agent's time")
        return None

    def _raise_for_end(self, stopped: StopReason) -> None:
        """Turn an end that the model side caused into its error."""
        totals = self.models.totals()
        if totals is not None and totals.failure is not None:
            raise model_failure(*totals.failure)
        if stopped is StopReason.CONTEXT_LIMIT:
            raise ContextLimitError("the conversation no longer fits the model's context")
        if stopped is StopReason.BUDGET:
            raise BudgetError("the rollout's token, call or cost budget is spent")

    def _excused(self) -> float:
        """Seconds that do not count against the agent: only with the ``work`` clock."""
        totals = self.models.totals() if self.config.timeout_clock == "work" else None
        return totals.retry_wait_sec if totals else 0.0

    async def _close_session(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is not None:
            await session.close()
            self._closed_usage.append(session.usage)

    def _worth_verifying(self) -> bool:
        if self.sandbox is None:
            return False
        return self.error is None or (
            isinstance(self.error, RolloutError) and self.error.attribution == "score"
        )

    def verify_mode(self) -> VerifyMode:
        """As asked; else isolated where the agent was not kept apart from the verifier: the task
        says so, the agent was root, or the sandbox has a single user."""
        if self.config.verify_mode is not None:
            return "isolated" if self.config.verify_mode == "isolated" else "shared"
        apart = self._agent_user() is not None and self.live.capabilities.multiple_users
        return "shared" if apart and not self.task.verifier.isolated else "isolated"

    def _verify_request(self) -> VerifyRequest:
        assert self.image is not None
        return VerifyRequest(
            task=self.task,
            node=self._at,
            path=tuple(node.id for node in self.tree.path(self._at)),
            subtree=tuple(node.id for node in self.tree.subtree(self._at)),
            sandbox=self.live,
            provider=self.planes.provider,
            image=self.image,
            logs=self.files.folder / "verifier",
            workspace=self.workspace,
            agent_user=self._agent_user(),
            mode=self.verify_mode(),
            hardening=self.config.hardening,
            baseline=self._baseline,
            timeout=self.task.verifier.timeout_sec,
            redact=self.planes.redact,
        )

    async def _collect_artifacts(self) -> None:
        for path in self.task.artifacts:
            target = self.files.folder / "artifacts" / path.strip("/").replace("/", "__")
            try:
                await self.live.download(path, target)
            except RolloutError as error:
                self._emit("verify", message=f"artifact {path} was not kept: {error}")

    async def _clean(self) -> Result | None:
        with self._clock.measure("teardown"):
            for name in list(self._sessions):
                await self._let_go(self._close_session(name))
            if self.sandbox is not None:
                await self._let_go(self.sandbox.teardown())
        totals = await self.models.close()
        if self._files is not None:
            self.result = fold.result_record(self, self._clock, totals, self._closed_usage, self._agents)
            self._mask_errors(self.result)
            self._files.close(self.tree, self.result.timing)
            self._files.result(self.result)
            self._emit("done", reward=self.result.reward)
        if self._owns_planes:
            await self.planes.close()
        return self.result

    async def _let_go(self, ending: Awaitable[None]) -> None:
        """A session or sandbox, of whatever plugin, that fails to end must not cost the record
        of what is already scored, nor the end of the rest."""
        try:
            await ending
        except Exception as error:
            if self.verdict is None:
                known = isinstance(error, BenchflowError)
                self._note(error if known else SandboxLostError(f"{type(error).__name__}: {error}"))
            self._emit("teardown", message=f"could not be ended cleanly: {error}")

    def _mask_errors(self, result: Result) -> None:
        """Files are masked as they are written; these words are also printed."""
        redact = self.planes.redact
        result.error = redact.text(result.error) if result.error else None
        result.verifier_error = redact.text(result.verifier_error) if result.verifier_error else None

    def _note(self, error: BenchflowError) -> None:
        if self.error is None:
            self.error = error

    @contextmanager
    def _phase(self, name: str, clock: str) -> Generator[None]:
        """Time a phase and classify what ends it, once, where it happened."""
        if self._cleanup is not None:
            raise UsageError("this rollout has ended", fix="one Rollout is one run; create another")
        self._emit(name)
        with self._clock.measure(clock):
            try:
                yield
            except BenchflowError as error:
                self._raise_if_cancelled(error)
                self._note(error)
                if self._files is not None and not isinstance(error, RolloutError):
                    raise _as_rollout_error(error) from error
                raise
            except asyncio.CancelledError:
                self._note(RolloutCancelled("interrupted"))
                raise
            except Exception as error:
                # The boundary where a fault of the engine or of a plugin becomes data: one
                # rollout is lost with its evidence, the job goes on.
                self._raise_if_cancelled(error)
                self._note(RolloutError(f"internal error: {type(error).__name__}: {error}"))
                if self._files is None:
                    raise
                (self._files.folder / "engine-error.txt").write_text(
                    self.planes.redact.text(traceback.format_exc())
                )
                raise RolloutError(f"internal error: {type(error).__name__}: {error}") from error

    def _raise_if_cancelled(self, error: Exception) -> None:
        """What breaks because the task is being cancelled is the cancellation."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            self._note(RolloutCancelled("interrupted"))
            raise asyncio.CancelledError from error

    def _emit(self, phase: str, *, reward: float | None = None, message: str | None = None) -> None:
        if self._on_event is None or self._task is None:
            return
        totals = self.models.totals()
        tokens = None
        if totals and totals.prompt_tokens is not None and totals.completion_tokens is not None:
            tokens = totals.prompt_tokens + totals.completion_tokens
        live = sum(session.n_tool_calls for session in self._sessions.values())
        self._on_event(
            RolloutEvent(
                rollout=self._files.folder.name if self._files else "",
                task=self._task.name,
                trial=self.config.trial,
                phase=phase,
                tool_calls=max(self.n_tool_calls, live),
                tokens=tokens,
                cost_usd=totals.cost_usd if totals else None,
                reward=reward,
                message=message,
            )
        )


def _as_rollout_error(error: BenchflowError) -> RolloutError:
    """A prerequisite or task fault found after the folder exists belongs to this rollout."""
    return RolloutError(error.message, fix=error.fix)
