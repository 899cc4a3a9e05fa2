"""A rollout as a tree of states: append-only, pure data.

A node is a state; the step that led to it is stored on it. A linear rollout is a
degree-1 tree. Trajectories are computed (``path``), never stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

TREE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Step:
    """The edge that led to a node: one agent turn, from prompt to stop."""

    role: str
    prompt: int
    """Index into ``prompts.json``."""
    scene: str
    stop_reason: str | None
    tool_calls: int = 0
    started_at: str | None = None
    duration: float | None = None


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    parent: str | None
    step: Step | None = None
    label: str | None = None
    """Name of the branch child, when this node starts one."""


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A state saved at a node: ``layer`` is environment, sandbox or session."""

    node: str
    layer: str
    digest: str
    level: str | None = None


@dataclass(frozen=True, slots=True)
class NodeReward:
    node: str
    value: float | None
    source: str
    space: str = "output"
    granularity: str = "terminal"


@dataclass(slots=True)
class Tree:
    """Only ``add``, ``add_snapshot`` and ``add_reward`` change it, and they only append."""

    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    snapshots: list[SnapshotRef] = field(default_factory=list[SnapshotRef])
    rewards: list[NodeReward] = field(default_factory=list[NodeReward])
    _children: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    @classmethod
    def rooted(cls) -> Tree:
        tree = cls()
        tree._insert(Node("n0", None))
        return tree

    @property
    def root(self) -> Node:
        return next(iter(self.nodes.values()))

    def add(self, parent: str, step: Step, *, label: str | None = None) -> Node:
        """Append the state that ``step`` led to from ``parent``."""
        if parent not in self.nodes:
            raise KeyError(f"no node {parent!r} in this tree")
        node = Node(f"n{len(self.nodes)}", parent, step, label)
        self._insert(node)
        return node

    def next_id(self) -> str:
        """The id that the next ``add`` will give."""
        return f"n{len(self.nodes)}"

    def add_snapshot(self, ref: SnapshotRef) -> None:
        self.nodes[ref.node]
        self.snapshots.append(ref)

    def add_reward(self, reward: NodeReward) -> None:
        self.nodes[reward.node]
        self.rewards.append(reward)

    def children(self, node: str) -> list[Node]:
        return [self.nodes[child] for child in self._children.get(node, ())]

    def path(self, node: str) -> list[Node]:
        """From the root to ``node``, both included."""
        found: list[Node] = []
        at: str | None = node
        while at is not None:
            found.append(self.nodes[at])
            at = self.nodes[at].parent
        return found[::-1]

    def subtree(self, node: str) -> Iterator[Node]:
        """``node`` and everything below it, depth first, in the order of birth."""
        stack = [node]
        while stack:
            at = stack.pop()
            yield self.nodes[at]
            stack.extend(reversed(self._children.get(at, ())))

    def leaves(self) -> list[Node]:
        return [node for node in self.nodes.values() if not self._children.get(node.id)]

    def record(self) -> dict[str, Any]:
        return {
            "schema_version": TREE_VERSION,
            "nodes": [asdict(node) for node in self.nodes.values()],
            "snapshots": [asdict(ref) for ref in self.snapshots],
            "rewards": [asdict(reward) for reward in self.rewards],
        }

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Tree:
        """Read ``tree.json``. Raises ``ValueError`` for a newer version or a broken parent link."""
        version = record.get("schema_version")
        if not isinstance(version, int) or version > TREE_VERSION:
            raise ValueError(f"tree.json has schema_version {version!r}, newer than {TREE_VERSION}")
        tree = cls()
        for item in record["nodes"]:
            step = Step(**item["step"]) if item.get("step") else None
            parent = item["parent"]
            if parent is not None and parent not in tree.nodes:
                raise ValueError(f"tree.json: node {item['id']!r} comes before its parent {parent!r}")
            if parent is None and tree.nodes:
                raise ValueError(f"tree.json: node {item['id']!r} is a second root")
            if item["id"] in tree.nodes:
                raise ValueError(f"tree.json: node {item['id']!r} appears twice")
            tree._insert(Node(item["id"], parent, step, item.get("label")))
        for item in record.get("snapshots", ()):
            tree.add_snapshot(SnapshotRef(**item))
        for item in record.get("rewards", ()):
            tree.add_reward(NodeReward(**item))
        return tree

    def _insert(self, node: Node) -> None:
        self.nodes[node.id] = node
        if node.parent is not None:
            self._children.setdefault(node.parent, []).append(node.id)
