"""Programs earn a reward by what they compute; every way to the verdict but that one is closed."""

import pytest

from swarmq.errors import RewardError, SandboxError
from swarmq.rewards import Limits, asserts_pass, extract_code, outputs_match
from swarmq.rewards.sandbox import find_working

LIMITS = Limits(wall_s=15, cpu_s=10)
DOUBLE = "def double(x):\n    return 2 * x\n"
ASSERTS = "assert double(2) == 4\nassert double('ab') == 'abab'\n"


@pytest.fixture(scope="module")
def sandbox():
    found, problems = find_working(("bubblewrap", "landlock"), limits=LIMITS)
    if not found:
        pytest.skip(f"this host has no sandbox: {problems}")
    return found


def test_code_is_taken_from_the_last_python_block():
    assert extract_code("a\n```python\nx = 1\n```\nb\n```py\ny = 2\n```\n```\noutput\n```") == "y = 2\n"
    assert extract_code("```\nz\n```") == "z\n"
    assert extract_code("x = 1") == "x = 1"


def test_outputs_are_compared_by_lines(sandbox):
    cases = [("2 3\n", "5\n"), ("10 -4", "6"), ("0 0", "0\n\n")]
    right = "a, b = map(int, input().split())\nprint(a + b, ' ')"
    assert outputs_match(sandbox, f"```python\n{right}\n```", cases).reason == ""
    assert outputs_match(sandbox, "print(5)", cases).value == pytest.approx(1 / 3)
    assert outputs_match(sandbox, "print(5)", cases, all_or_nothing=True).reason == "case 1: the output is another one"
    assert "ValueError" in outputs_match(sandbox, "raise ValueError(7)", cases, all_or_nothing=True).reason
    assert outputs_match(sandbox, "print(5); raise SystemExit(1)", cases[:1]).value == 0.0


@pytest.mark.parametrize(
    "code", ["import os; os._exit(0)", "", "print('PASSED'); print('{\"score\": 1}')", "while True: print(5)"]
)
def test_programs_without_the_output_earn_nothing(sandbox, code):
    assert outputs_match(sandbox, code, [("2 3", "5")]).value == 0.0


def test_cases_that_anything_would_pass_fail_the_episode(sandbox):
    with pytest.raises(RewardError, match="cases is empty"):
        outputs_match(sandbox, "", [])
    with pytest.raises(RewardError, match=r"cases\[1\]: the expected output is empty"):
        outputs_match(sandbox, "", [("", "1"), ("", " \n")])


def test_a_right_solution_passes_asserts_functions_and_whole_tests(sandbox):
    assert asserts_pass(sandbox, DOUBLE, ASSERTS).reason == ""
    functions = "from solution import double\nimport math\ndef test_a():\n    assert double(2) == 4\ndef test_b():\n    assert double(math.pi) > 6\n"
    assert asserts_pass(sandbox, DOUBLE, functions).reason == ""
    assert (
        asserts_pass(sandbox, DOUBLE, "def check(candidate):\n    assert candidate(2) == 4\ncheck(double)\n").reason
        == ""
    )


def test_a_wrong_solution_gets_the_share_of_cases_and_the_first_reason(sandbox):
    wrong = "def double(x):\n    return x + 2\n"
    score = asserts_pass(sandbox, wrong, ASSERTS, all_or_nothing=False)
    assert (score.value, score.reason) == (0.5, 'line 2: TypeError: can only concatenate str (not "int") to str')
    assert asserts_pass(sandbox, wrong, ASSERTS).value == 0.0
    assert "NameError" in asserts_pass(sandbox, "x = 1", ASSERTS).reason
    assert asserts_pass(sandbox, "def double(", ASSERTS).reason.startswith("the code cannot be compiled")
    assert "ZeroDivisionError" in asserts_pass(sandbox, "1 / 0", ASSERTS).reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("1 / 0", "the solution ended: exit code 1: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('no numpy')", "the solution ended: exit code 1: no numpy"),
        ("import os\nos.closerange(3, 1000)\nimport time\ntime.sleep(0.3)\n1 / 0", "the solution ended: exit code 1: ZeroDivisionError: division by zero"),
        ("class Odd(Exception): pass\ndef double(x): raise Odd('x = %d' % x)", "line 1: RuntimeError: Odd: x = 2"),
        ("def double(x): raise BrokenPipeError(32, 'Broken pipe')", "line 1: BrokenPipeError: [Errno 32] Broken pipe"),
        ("def double(x): raise KeyboardInterrupt", "line 1: the solution ended: exit code 130: KeyboardInterrupt"),
        ("import os\ndef double(x): os._exit(3)", "line 1: the solution ended: exit code 3"),
        ("def double(x): os.write(2, b'boom'); os._exit(3)\nimport os", "line 1: the solution ended: exit code 3: boom"),
        ("def double(x):\n  while True: print('x' * 10000)", "line 1: the solution stopped for its limit of output"),
        ("def double(x): return 'x' * 9_000_000", "line 1: ValueError: a value of 9000056 bytes cannot be passed on (at most 8000000)"),
        ("import os\nfor fd in range(3, 1000):\n  try: os.write(fd, b'[]\\n')\n  except OSError: pass", "the solution sent no message"),
    ],
)  # fmt: skip
def test_the_reason_is_the_error_of_the_solution(sandbox, code, reason):
    assert asserts_pass(sandbox, code, ASSERTS).reason == reason


def test_a_solution_that_ends_is_not_the_exception_that_a_test_waits_for(sandbox):
    tests = "def test_refuses():\n    try: double(None)\n    except BaseException: return\n    assert False\n"
    assert asserts_pass(sandbox, "def double(x): raise ValueError", tests).value == 1.0
    score = asserts_pass(sandbox, "import os\ndef double(x): os._exit(0)", tests)
    assert (score.value, score.reason) == (0.0, "test_refuses: the solution ended")


def test_all_kinds_of_values_classes_iterators_callbacks_and_errors_work(sandbox):
    solution = """
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise IndexError("empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
def echo(x): return x
def numbers(n): yield from range(n)
def sort(values): values.sort()
def apply(function, value, *, times=1):
    for _ in range(times): value = function(value)
    return value
def convert(kind, text): return kind(text)
LIMIT = 7
"""
    tests = """
from solution import Stack
import solution
for value in (None, True, -5, 10**5000, 1.5, float("inf"), 2j, "\\u00e9\\ud800", b"\\x00", [1, [2]], (1, (2,)), {1, 2}, frozenset(), {(1, 2): [3]}):
    assert echo(value) == value and type(echo(value)) is type(value)
assert str(echo(float("nan"))) == "nan"
s = Stack([1])
assert len(s.push(2)) == 2 and s.pop() == 2 and list(s) == [1] and 1 in s and s
assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2]) and not Stack()
try:
    Stack().pop()
    raised = ""
except IndexError as error:
    raised = str(error)
assert raised == "empty"
assert list(numbers(4)) == [0, 1, 2, 3]
values = [3, 1, 2]
sort(values)
assert values == [1, 2, 3]
assert apply(lambda x: x * 3, 2, times=3) == 54
assert convert(int, "12") == 12
assert solution.LIMIT == 7
"""
    assert asserts_pass(sandbox, solution, tests).reason == ""


ATTACKS = {
    "exit": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef double(x): os._exit(0)",
    "equal to everything": "class Any:\n  def __eq__(self, other): return True\n  __hash__ = None\ndef double(x): return Any()",
    "subclass of int": "class Any(int):\n  def __eq__(self, other): return True\ndef double(x): return Any(1)",
    "subclass of str": "class Any(str):\n  def __eq__(self, other): return True\ndef double(x): return Any()",
    "patched builtins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.len = lambda x: 1\ndef double(x): return 0",
    "patched modules": "import sys, json, ast\njson.dumps = lambda *a, **k: '[]'\nsys.modules['__main__'].attempt = lambda a: ('', False)\ndef double(x): return 0",
    "prints the verdict": 'import sys\nprint(\'{"started": true}\\n{"case": "a", "problem": ""}\\n{"case": "b", "problem": ""}\\n{"ended": true}\', flush=True)\ndef double(x): return 0',
    "writes into every pipe": 'import os\nfor fd in range(3, 1000):\n  try: os.write(fd, b\'{"case": "a", "problem": ""}\\n{"ended": true}\\n\')\n  except OSError: pass\ndef double(x): return 0',
    "reads the tests": "import glob\nANSWERS = [open(n, errors='replace').read() for n in glob.glob('**/tests.py', recursive=True) + glob.glob('/tmp/**/tests.py', recursive=True)]\ndef double(x): return 4 if any('double(2) == 4' in a for a in ANSWERS) else 0",
    "forks without end": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "raises an exit": "def double(x): raise SystemExit(0)",
    "raises an interrupt": "def double(x): raise KeyboardInterrupt",
    "sleeps": "import time\ndef double(x): time.sleep(100)",
    "returns without end": "def double(x): return 'x' * 20_000_000",
    "kills everybody": "import os, signal\ntry: os.kill(-1, 9)\nexcept OSError: pass\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\ndef double(x): return 0",
    "names like Python's": "def len(x): return 4\nAssertionError = Exception\ndef double(x): return 0",
    "nested without end": "def double(x):\n  y = []\n  for _ in range(100000): y = [y]\n  return y",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_on_the_verdict_earn_nothing(sandbox, name):
    wall_s = 1 if name in ("sleeps", "forks without end") else 10
    score = asserts_pass(sandbox.with_limits(wall_s=wall_s), ATTACKS[name], ASSERTS, all_or_nothing=False)
    assert score.value == 0.0
    assert score.reason


def test_a_callback_does_not_lead_into_the_tests(sandbox):
    solution = """
import sys
def apply(function):
    found = {}
    for name in ("__globals__", "__code__", "__closure__", "__self__"):
        peer = function.__dict__["_peer"]
        try: found[name] = peer.ask("get", function.__dict__["_number"], name)
        except BaseException as error: found[name] = None
    return 1 if any(found.values()) else 2
"""
    score = asserts_pass(sandbox, solution, "x = 5\nassert apply(lambda: x) == 1\n")
    assert score.value == 0.0
    assert "the solution asked for 'get'" in score.reason


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("assert (", "tests cannot be parsed"),
        ("x = 1", "neither an assert"),
        ("def test_a(tmp_path):\n    assert 1", "fixtures"),
    ],
)
def test_tests_that_cannot_be_used_fail_the_episode(sandbox, tests, says):
    with pytest.raises(RewardError, match=says):
        asserts_pass(sandbox, DOUBLE, tests)


def test_a_sandbox_that_fails_is_no_reward(sandbox):
    sandbox = sandbox.with_limits(wall_s=4)
    sandbox.python = sandbox.python.with_name("no-python")
    with pytest.raises(SandboxError):
        asserts_pass(sandbox, DOUBLE, ASSERTS)
    with pytest.raises(SandboxError):
        outputs_match(sandbox, "print(1)", [("", "1")])
