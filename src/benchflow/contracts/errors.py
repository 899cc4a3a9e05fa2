"""The exception tree.

    BenchflowError
    ├── UsageError (ValueError)                what the user typed or wrote is wrong      exit 2
    │   └── TaskError                          a task package that cannot be read or run
    ├── PrerequisiteError (RuntimeError)       the machine lacks something                exit 3
    │   └── OwnedElsewhereError                another live process owns the job folder
    ├── JobDiedError                           the job that is followed ended without finishing  exit 1
    ├── StreamTimeoutError (TimeoutError)      nothing new came while following a job     exit 3
    └── RolloutError                           one rollout ended early; recorded as data
        ├── SandboxError (OSError)
        │   ├── ImageBuildError
        │   ├── SandboxStartError
        │   ├── SandboxLostError (ConnectionError)
        │   ├── TransferError                  an upload or download that was refused or failed
        │   └── HostPressureError              disk, memory or process table of the host is full
        ├── AgentError (RuntimeError)
        │   ├── AgentInstallError
        │   ├── AgentHandshakeError
        │   ├── AgentProtocolError
        │   ├── AgentCrashError
        │   ├── AgentTimeoutError (TimeoutError)      scored: the verifier still runs
        │   ├── AgentIdleTimeoutError (TimeoutError)  scored: the verifier still runs
        │   └── ContextLimitError                     scored: the verifier still runs
        ├── ModelError (ConnectionError)
        │   ├── EndpointError                  refused, lost, or 5xx after every retry
        │   ├── EndpointRejectedError          4xx: key, model name or request
        │   └── BudgetError                    scored: a token, cost or call budget ended it
        ├── VerifierError (RuntimeError)
        │   ├── RewardFileError                missing, stale, malformed or contradicting reward file
        │   ├── VerifierTimeoutError (TimeoutError)
        │   ├── VerifierFailedError            the verifier exited non-zero or could not start
        │   └── HardeningError                 the agent's processes could not be proved gone
        └── RolloutCancelled                    the job was interrupted

Each class fixes ``category`` (stable, written to files), ``phase`` and
``attribution`` (``score`` or ``mask``: may a trainer count this rollout?).
Every error survives pickling.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Attribution = Literal["score", "mask"]


class BenchflowError(Exception):
    """Root of all errors raised on purpose. ``fix`` is the user's next step."""

    category: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(cls: type[BenchflowError], state: dict[str, object]) -> BenchflowError:
    error = cls(str(state.get("message", "")))
    error.__dict__.update(state)
    return error


class UsageError(BenchflowError, ValueError):
    category = "usage"
    exit_code = 2


class TaskError(UsageError):
    """A task file that cannot be read. The message names file, line and key."""

    category = "task"


class PrerequisiteError(BenchflowError, RuntimeError):
    category = "prerequisite"
    exit_code = 3


class OwnedElsewhereError(PrerequisiteError):
    category = "owned"


class JobDiedError(BenchflowError):
    category = "job_died"


class StreamTimeoutError(BenchflowError, TimeoutError):
    category = "stream_timeout"
    exit_code = 3


class RolloutError(BenchflowError):
    """A rollout ended early. ``detail`` holds raw evidence (bounded text)."""

    category = "rollout"
    phase: ClassVar[str] = "unknown"
    attribution: ClassVar[Attribution] = "mask"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, fix: str | None = None, detail: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.detail = detail


class SandboxError(RolloutError, OSError):
    category, phase = "sandbox", "start"


class ImageBuildError(SandboxError):
    category, phase = "image_build", "image"


class SandboxStartError(SandboxError):
    category, retryable = "sandbox_start", True


class SandboxLostError(SandboxError, ConnectionError):
    category, phase, retryable = "sandbox_lost", "execute", True


class TransferError(SandboxError):
    category, phase = "transfer", "start"


class HostPressureError(SandboxError):
    category, phase, retryable = "host_pressure", "start", True


class AgentError(RolloutError, RuntimeError):
    category, phase = "agent", "execute"


class AgentInstallError(AgentError):
    category, phase, retryable = "agent_install", "install_agent", True


class AgentHandshakeError(AgentError):
    category, phase, retryable = "agent_handshake", "connect", True


class AgentProtocolError(AgentError):
    category = "agent_protocol"


class AgentCrashError(AgentError):
    category, retryable = "agent_crash", True


class AgentTimeoutError(AgentError, TimeoutError):
    category, attribution = "timeout", "score"


class AgentIdleTimeoutError(AgentError, TimeoutError):
    category, attribution = "idle_timeout", "score"


class ContextLimitError(AgentError):
    category, attribution = "context_limit", "score"


class ModelError(RolloutError, ConnectionError):
    category, phase = "model", "execute"


class EndpointError(ModelError):
    category, retryable = "endpoint", True


class EndpointRejectedError(ModelError):
    category = "endpoint_rejected"


class BudgetError(ModelError):
    category, attribution = "budget", "score"


class VerifierError(RolloutError, RuntimeError):
    category, phase = "verifier", "verify"


class RewardFileError(VerifierError):
    category = "reward_file"


class VerifierTimeoutError(VerifierError, TimeoutError):
    category, retryable = "verifier_timeout", True


class VerifierFailedError(VerifierError):
    category, retryable = "verifier_failed", True


class HardeningError(VerifierError):
    category, retryable = "hardening", True


class RolloutCancelled(RolloutError):
    """The job was interrupted while this rollout ran; resume runs it again."""

    category = "cancelled"


def model_failure(category: str, message: str) -> RolloutError:
    """The exception for a failure the gateway reports by category."""
    for cls in (EndpointError, EndpointRejectedError, BudgetError, ContextLimitError, HostPressureError):
        if cls.category == category:
            return cls(message)
    return ModelError(message)
