"""The data recorded while a profile is taken: owners, each with its tree of calls."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType


class Node:
    """A function, reached by one chain of calls. Its times exclude the functions it called."""

    __slots__ = ("calls", "children", "cpu_ns", "key", "parent", "wall_ns")

    def __init__(self, key: CodeType | str | None, parent: Node | None) -> None:
        self.key = key  # the code object, or the name of a function written in C
        self.parent = parent
        # By name for functions written in C, and by id(code object) for Python functions, because a dict with code
        # objects as keys would compare their contents. The child keeps the code object alive, so the id stays unique.
        self.children: dict[int | str, Node] = {}
        self.calls = 0
        self.cpu_ns = 0
        self.wall_ns = 0

    def add(self, index: int | str, key: CodeType | str) -> Node:
        node = self.children[index] = Node(key, self)
        return node

    def charge(self, wall_ns: int, cpu_ns: int) -> None:
        self.wall_ns += wall_ns
        self.cpu_ns += cpu_ns


class Owner:
    """A coro, a task, or a thread (for what it runs outside of coros and tasks): its tree and its position there."""

    __slots__ = ("is_suspended", "kind", "name", "root", "since_ns", "top", "usage", "waits_in", "yielded")

    def __init__(self, kind: str, name: str, rest: Owner | None = None) -> None:
        self.kind = kind
        self.name = name
        # Once there are MAX_OWNERS owners, all further coros share one tree, and all further tasks share another.
        # `rest` is the owner whose tree is shared. Each further coro or task has its own position in the shared tree.
        self.root: Node = rest.root if rest else Node(None, None)
        self.usage: list[int] = rest.usage if rest else [0, 0, 0, 0]
        self.top: Node = self.root
        # When a task waits, its functions yield one after another, from the innermost outwards. This is the innermost
        # of those that have just yielded.
        self.yielded: Node | None = None
        self.waits_in: Node | None = None  # the function in which a waiting task has yielded; `top` is the root then
        self.is_suspended = False
        self.since_ns = 0

    def suspend(self, now_ns: int) -> None:
        """Record that the owner stops running, because it waits or has ended."""
        if self.yielded is not None and self.top is self.root:
            self.waits_in = self.yielded
        self.is_suspended = True
        self.since_ns = now_ns

    def resume(self, now_ns: int) -> None:
        """Record that the owner runs again, and charge the waiting time to the function that waited."""
        if self.is_suspended:
            node = self.waits_in if self.waits_in is not None and self.top is self.root else self.top
            node.wall_ns += now_ns - self.since_ns
            self.is_suspended = False


class Recording:
    """A recorded profile. The owners are in the order in which they were first seen."""

    def __init__(self) -> None:
        self.owners: list[Owner] = []
        self.events = 0
        self.cost_ns = 0
        self.duration_ns = 0
