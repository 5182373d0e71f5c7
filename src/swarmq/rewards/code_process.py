"""Program of both sides of `asserts_pass`, each in a sandbox of its own. Runs as a script, without swarmq.

    tests (trusted)                               solution (untrusted)
    f(2) of a stand-in ──── ["call", f, [2]] ───>  f(2)
    assert 4 == 4      <─── ["value", 4] ────────
                       <─── ["call", callback] ──  functions among the arguments, the other way round

Only these values cross as values: None, numbers, text, bytes, lists, tuples, sets, dicts. The tests rebuild them as Python's own
types, so nothing that the solution defines (`__eq__`, a patched `assert`, a changed module) takes part in a comparison. All other
objects stay where they are and cross as references, whose methods are called there.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

MAX_MESSAGE = 8_000_000
"""Maximum bytes of a message between the two sides."""
PLAIN = (type(None), bool, str)


class PeerError(BaseException):
    """The other side is gone or sent no message; no `except Exception` of a test catches it."""


class Peer:
    """Connection to the other side: sends it requests, and answers the requests that it sends meanwhile."""

    def __init__(self, read: int, write: int, *, is_solution: bool) -> None:
        self._read, self._write = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self._mine: dict[int, Any] = {}
        self._is_solution = is_solution
        self.broken = ""
        """Why the other side cannot be asked any more; "" while it can."""
        self.has_ended = False

    def ask(self, *request: Any) -> Any:
        self._send(dump(request))
        while True:
            kind, *rest = self._receive()
            if kind == "value":
                return self.decode(rest[0])
            if kind == "error":
                raise make_error(str(rest[0]), str(rest[1]))
            self._answer(kind, rest)

    def serve(self) -> None:
        while True:
            kind, *rest = self._receive()
            self._answer(kind, rest)

    def _answer(self, kind: Any, rest: list[Any]) -> None:
        try:
            if kind == "call":
                target, arguments, named = self._mine[rest[0]], self.decode(rest[1]), self.decode(rest[2])
                value = target(*arguments, **named)
                reply = dump(["value", self.encode((value, arguments))])  # with what it changed in the arguments
            elif not self._is_solution:
                # The solution may call the functions that it was given. Attributes would lead it from those to everything else.
                raise self.fail(f"the solution asked for {kind!r}")
            elif kind == "get":
                reply = dump(["value", self.encode(getattr(self._mine[rest[0]], str(rest[1])))])
            elif kind == "operate":
                reply = dump(["value", self.encode(OPERATIONS[rest[0]](*self.decode(rest[1])))])
            elif kind == "names":
                names = [name for name in vars(self._mine[0]) if not name.startswith("_")]
                reply = dump(["value", self.encode(names)])
            else:
                raise self.fail(f"unexpected message {kind!r}")
        except (PeerError, KeyboardInterrupt):
            raise
        except BaseException as error:
            reply = dump(["error", type(error).__name__, str(error)[:500]])
        self._send(reply)

    def _send(self, line: bytes) -> None:
        try:
            self._write.write(line)
            self._write.flush()
        except (OSError, ValueError):
            self.has_ended = True
            raise self.fail("the solution ended") from None

    def _receive(self) -> list[Any]:
        try:
            line = self._read.readline(MAX_MESSAGE + 1)
            self.has_ended = not line
            message = json.loads(line)
        except (OSError, ValueError, RecursionError):
            raise self.fail("the solution ended" if self.has_ended else "the solution sent no message") from None
        if not isinstance(message, list) or not message:
            raise self.fail("the solution sent no message")
        return message

    def fail(self, why: str) -> PeerError:
        """Mark the connection as broken, and return the error to raise."""
        self.broken = self.broken or why
        return PeerError(self.broken)

    def encode(self, value: Any) -> Any:
        if isinstance(value, Reference) and value.__dict__["_peer"] is self:
            return {"yours": value.__dict__["_number"]}
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is int:
            return {"int": hex(value)}
        if kind is float:
            return {"float": value.hex()}
        if kind is complex:
            return {"complex": [value.real.hex(), value.imag.hex()]}
        if kind in (bytes, bytearray):
            return {kind.__name__: value.hex()}
        if kind in (list, tuple, set, frozenset):
            return {kind.__name__: [self.encode(item) for item in value]}
        if kind is dict:
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        name = getattr(value, "__name__", "")
        if kind is type and getattr(builtins, name, None) is value:
            return {"type": name}
        self._mine[id(value)] = value  # kept, so that the number stays its own
        return {"mine": id(value), "callable": callable(value)}

    def decode(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return value
        if not isinstance(value, dict) or not value:
            raise self.fail("the solution sent a value of an unknown type")
        kind, content = next(iter(value.items()))
        try:
            if kind == "int":
                return int(content, 16)
            if kind == "float":
                return float.fromhex(content)
            if kind == "complex":
                return complex(float.fromhex(content[0]), float.fromhex(content[1]))
            if kind in ("bytes", "bytearray"):
                return getattr(builtins, kind).fromhex(content)
            if kind in ("list", "tuple", "set", "frozenset"):
                return getattr(builtins, kind)(self.decode(item) for item in content)
            if kind == "dict":
                return {self.decode(key): self.decode(item) for key, item in content}
            if kind == "type" and type(found := getattr(builtins, content)) is type:
                return found
            if kind == "yours":
                return self._mine[content]
            if kind == "mine":
                return Reference(self, int(content))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError):
            pass
        raise self.fail("the solution sent a value of an unknown type")

    def register(self, value: Any) -> None:
        self._mine[0] = value


def dump(message: Any) -> bytes:
    line = json.dumps(message).encode() + b"\n"
    if len(line) > MAX_MESSAGE:
        raise ValueError(f"a value of {len(line)} bytes cannot be passed on (at most {MAX_MESSAGE})")
    return line


def call(reference: Reference, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    peer, number = reference.__dict__["_peer"], reference.__dict__["_number"]
    answer = peer.ask("call", number, peer.encode(arguments), peer.encode(named))
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], tuple):
        raise peer.fail("the solution sent a value of an unknown type")
    value, changed = answer
    for before, after in zip(arguments, changed, strict=False):
        copy_changes(before, after)
    return value


def copy_changes(before: Any, after: Any) -> None:
    """Give the argument `before` the content `after`, which it has on the other side after a call."""
    if type(before) is not type(after):
        return
    if isinstance(before, (list, bytearray)):
        before[:] = after
    elif isinstance(before, (dict, set)):
        before.clear()
        before.update(after)


class Reference:
    """Stand-in for an object of the other side, on which the object's methods are called."""

    def __init__(self, peer: Peer, number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__enter__", "__exit__"):
            raise AttributeError(name)
        return self.__dict__["_peer"].ask("get", self.__dict__["_number"], name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return call(self, arguments, named)

    def __eq__(self, other: object) -> bool:
        # A value never equals a reference: its own idea of equality would decide.
        if not isinstance(other, Reference):
            return False
        if self.__dict__["_number"] == other.__dict__["_number"]:
            return True
        return operate(self, "eq", self, other) is True

    def __hash__(self) -> int:
        return int(self.__dict__["_number"])

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *_: object) -> None:
        self.__getattr__("__exit__")(None, None, None)


def operate(reference: Reference, name: str, *operands: Any) -> Any:
    peer = reference.__dict__["_peer"]
    return peer.ask("operate", name, peer.encode(operands))


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{one.__name__: one for one in (len, iter, next, str, repr, bool, abs, reversed, pow, float, int)},
    **{
        name: getattr(operator, name)
        for name in ("contains", "getitem", "setitem", "delitem", "eq", "lt", "le", "gt", "ge", "neg")
    },
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")},
}
for _name in OPERATIONS.keys() - {"eq"}:
    setattr(Reference, f"__{_name}__", lambda self, *others, _name=_name: operate(self, _name, self, *others))
for _name in ("add", "sub", "mul"):
    setattr(Reference, f"__r{_name}__", lambda self, other, _name=_name: operate(self, _name, other, self))


def make_error(name: str, message: str) -> BaseException:
    """Return a built-in exception with this name, or RuntimeError if there is none or it would end the tests."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:
            pass
    return RuntimeError(f"{name}: {message}")


def run_solution(read: int, write: int) -> None:
    peer = Peer(read, write, is_solution=True)
    module = types.ModuleType("solution")
    module.__dict__["__file__"] = "solution.py"
    sys.modules["solution"] = module
    with open("solution.py", encoding="utf-8", errors="surrogatepass") as file:  # noqa: PTH123 - the solution may change pathlib
        source = file.read()
    exec(compile(source, "solution.py", "exec"), module.__dict__)  # noqa: S102 - this is what the sandbox is for
    peer.register(module)
    with contextlib.suppress(PeerError):
        peer.serve()


def run_tests(read: int, write: int) -> None:
    """Run the cases against the solution, which is reached by the pipes `read` and `write`; write one JSON line for each case, and
    one at the end."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print is no result

    def say(value: Any) -> None:
        results.write(json.dumps(value) + "\n")
        results.flush()

    with open("tests.py", encoding="utf-8") as file:  # noqa: PTH123
        tree = ast.parse(file.read(), "tests.py")
    peer = Peer(read, write, is_solution=False)
    try:
        names = peer.ask("names")
        solution = types.ModuleType("solution")
        solution.__dict__["__getattr__"] = lambda name: get(peer, name)
        sys.modules["solution"] = solution
        scope: dict[str, Any] = {"__name__": "tests"}
        # In the tests, names of built-ins mean Python's own, whatever the solution defines under these names.
        wanted = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(dir(builtins))
        for name in wanted & {name for name in names if isinstance(name, str)}:
            scope[name] = get(peer, name)
        run_cases(tree, scope, say, peer)
    except PeerError:
        pass
    say({"ended": True, "broken": peer.broken, "solution_ended": peer.has_ended})


def get(peer: Peer, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return peer.ask("get", 0, name)


def run_cases(tree: ast.Module, scope: dict[str, Any], say: Callable[[Any], None], peer: Peer) -> None:
    """Call `say` with the name and the problem of each case, until the solution cannot be asked any more."""
    has_functions = any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in tree.body)
    whole = not has_functions and not any(isinstance(node, ast.Assert) for node in tree.body)
    broken = ""
    for node in tree.body:
        code = compile(ast.Module([node], []), "tests.py", "exec")
        problem = attempt(lambda code=code: exec(code, scope), peer)  # type: ignore[misc]  # noqa: S102
        broken = broken or ("" if isinstance(node, ast.Assert) else problem)
        if isinstance(node, ast.Assert):
            say({"case": f"line {node.lineno}", "problem": broken or problem})
        elif whole and problem:
            break
        if peer.broken:
            return
    if whole:
        say({"case": "tests", "problem": broken})
    for name, value in list(scope.items()):
        if name.startswith("test_") and isinstance(value, types.FunctionType):
            say({"case": name, "problem": broken or attempt(value, peer)})
            if peer.broken:
                return


def attempt(action: Callable[[], Any], peer: Peer) -> str:
    """Run a case and return what went wrong in it; "" if it passed."""
    try:
        action()
    except PeerError as error:
        return str(error)
    except BaseException as error:
        return peer.broken or f"{type(error).__name__}: {error}"[:200].rstrip(": ")
    return peer.broken


if __name__ == "__main__":
    {"solution": run_solution, "tests": run_tests}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
