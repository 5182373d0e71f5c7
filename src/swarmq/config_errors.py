"""Error messages for unknown settings and wrong values: the full path, the value, and a suggestion. Pure.

An unknown name is compared, in this order, with

    names of the setting in other libraries, and initials                lr -> learning_rate
    names in the same section, one edit away                             temprature -> temperature
    names in other sections, exactly                                     train.temperature -> policies.main.sampling.temperature
    names in the same section, further away or sharing words             max_new_tokens -> max_tokens
    names in other sections, one edit away
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import msgspec.inspect

ELSEWHERE = {
    "lr": "policies.*.train.learning_rate",
    "epsilon": "policies.*.train.loss.clip_low",
    "clip_eps": "policies.*.train.loss.clip_low",
    "cliprange": "policies.*.train.loss.clip_low",
    "epsilon_high": "policies.*.train.loss.clip_high",
    "beta": "policies.*.train.loss.kl",
    "kl_beta": "policies.*.train.loss.kl",
    "kl_coef": "policies.*.train.loss.kl",
    "entropy_coef": "policies.*.train.loss.entropy_bonus",
    "entropy_coeff": "policies.*.train.loss.entropy_bonus",
    "gamma": "policies.*.train.call_discount",
    "critic.gamma": "policies.*.train.critic.discount",
    "lam": "policies.*.train.critic.gae_lambda",
    "cliprange_value": "policies.*.train.critic.value_clip",
    "critic_warmup": "policies.*.train.critic.warmup_steps",
    "algorithm": "policies.*.train.advantage",
    "adv_estimator": "policies.*.train.advantage",
    "max_grad_norm": "policies.*.train.grad_clip",
    "gradient_clipping": "policies.*.train.grad_clip",
    "save_steps": "policies.*.train.checkpoint_every",
    "lora_rank": "policies.*.train.lora.rank",
    "lora_alpha": "policies.*.train.lora.alpha",
    "target_modules": "policies.*.train.lora.modules",
    "report_to": "policies.*.train.trackers",
    "batch_size": "groups.groups_per_batch",
    "train_batch_size": "groups.groups_per_batch",
    "micro_batch_size": "policies.*.train.micro_batch_tokens",
    "n": "groups.group_size",
    "num_generations": "groups.group_size",
    "rollout_n": "groups.group_size",
    "max_completion_length": "policies.*.sampling.max_tokens",
    "max_response_length": "policies.*.sampling.max_tokens",
    "max_new_tokens": "policies.*.sampling.max_tokens",
    "context_length": "policies.*.engine.max_model_len",
    "max_length": "policies.*.engine.max_model_len",
    "max_seq_len": "policies.*.engine.max_model_len",
    "eval_steps": "eval.every",
    "tensor_parallel_size": "policies.*.engine.arguments",
    "model_name": "policies.*.model",
    "name": "run",
}
"""Name of a setting in other libraries, or section and name, -> path of the same setting in swarmq."""

MAX_HINTS = 3
MAX_VALUE_CHARS = 60
STEPS = re.compile(r"\w+|\[[^]]*\]")
"""Pattern of the steps of a path as msgspec writes it: `policies[...].train.betas[0]`."""
WORD = 4
"""Number of first letters that two words must share to count as alike."""

Type = msgspec.inspect.Type


def explain(complaint: str, tree: Mapping[str, Any], root: type) -> str:
    """Return msgspec's complaint about `tree` with full path, value and suggestion. `root`: the type to which `tree` was converted."""
    what, place = complaint.partition(" - at `$")[0], parse_error_path(complaint)
    steps = _concrete(complaint, STEPS.findall(place), tree, root)
    there = msgspec.inspect.type_info(root)
    for step in STEPS.findall(place):
        there = _find_type_at(there, step)
    path = _join_steps(steps)
    if isinstance(there, msgspec.inspect.StructType) and (wrong := re.fullmatch("Object contains .*`(.*)`", what)):
        meant = suggest_settings(wrong[1], steps, tree, root)
        names = f"there are {', '.join(field.encode_name for field in there.fields)}"
        return f"{_join_steps([*steps, wrong[1]])}: unknown field; {f'did you mean {meant}?' if meant else names}"
    if missing := re.fullmatch("Object missing required field `(.*)`", what):
        return f"{_join_steps([*steps, missing[1]])}: missing"
    if path and isinstance(there, msgspec.inspect.StructType) and re.match(_any_field_of(there), what):
        return f"{path}.{what}"  # the complaint of a check that compares the section's settings
    value = _get_at(tree, steps)
    if (choices := list_choices(there)) and what.startswith(("Invalid enum value", "Expected `str` matching regex")):
        what = f"{value!r} is none of {', '.join(map(str, choices))}" + _hint_of_value(value, steps, tree, root)
    elif what.startswith("Expected"):
        what = what.replace("`object | null`", "a table").replace("`object`", "a table")
        what = f"{what}{'' if ', got ' in what else ', got'} {_format_short(value)}"
    return f"{path}: {what}" if path else what


def _any_field_of(section: msgspec.inspect.StructType) -> str:
    """Return a pattern of the beginning of a complaint that names a setting of the section: `name: ...` or `name.name: ...`."""
    return rf"({'|'.join(field.encode_name for field in section.fields)})(\.\w+)*: "


def list_choices(there: Type) -> tuple[Any, ...]:
    """Return the values of a setting of this type if it names one of several; a setting that may also name a method of the user's
    own has `module:function` as the last value."""
    match _without_none(there):
        case msgspec.inspect.LiteralType(values=values):
            return tuple(values)
        case msgspec.inspect.Metadata(extra={"names": names}):
            return (*sorted(names), "module:function")
    return ()


def parse_error_path(complaint: str) -> str:
    """Return the path in a message of msgspec, e.g. `policies[...].train`."""
    return complaint.partition(" - at `$")[2].rstrip("`").lstrip(".")


def suggest_settings(wrong: str, steps: Sequence[str], tree: Mapping[str, Any], root: type) -> str:
    """Return the settings that the unknown name `wrong`, in the section at `steps`, probably means; "" if none is similar."""
    every = list_setting_paths(root)
    section = _pattern(steps, root)
    own = [path for path in every if path.rpartition(".")[0] == section]
    others = [path for path in every if path not in own]
    alias = ELSEWHERE.get(".".join([*steps[-1:], _plain(wrong)])) or ELSEWHERE.get(_plain(wrong))

    def name(path: str) -> str:
        return path.rpartition(".")[2]

    stages: tuple[Callable[[], list[str]], ...] = (
        lambda: [alias] if alias else [],
        lambda: [path for path in own if _plain(wrong) in (_plain(name(path)), _initials(name(path)))],
        lambda: _nearest(wrong, own, name, most=1),
        lambda: [path for path in others if _plain(name(path)) == _plain(wrong)],
        lambda: _nearest(wrong, own, name, most=max(1, len(wrong) // 3)),
        lambda: _find_similar_words(wrong, own, name),
        lambda: _nearest(wrong, others, name, most=1 if len(wrong) > WORD else 0),
    )
    found: list[str] = next((some for stage in stages if (some := stage())), [])
    found = sorted(found, key=lambda path: (-_count_shared(path, section), path.count(".")))[:MAX_HINTS]
    return " or ".join(name(path) if path in own else _fill_pattern(path, steps, tree) for path in found)


@functools.cache
def list_setting_paths(root: type) -> tuple[str, ...]:
    """Return the path of every setting and section, with `*` for a name that the user chooses and `[*]` for a list index."""
    return tuple(path for path, _ in _walk(msgspec.inspect.type_info(root), ""))


@functools.cache
def list_file_settings(root: type) -> tuple[tuple[str, str], ...]:
    """Return path and kind (`file` or `model`) of every setting of the types `FileName` and `ModelName` of `swarmq.config`."""
    return tuple(
        (path, kind)
        for path, there in _walk(msgspec.inspect.type_info(root), "")
        if isinstance(there, msgspec.inspect.Metadata) and (kind := (there.extra or {}).get("names_a"))
    )


def _walk(there: Type, path: str) -> Iterator[tuple[str, Type]]:
    there = _without_none(there)
    if path:
        yield path, there
    match there:
        case msgspec.inspect.StructType(fields=fields):
            for field in fields:
                yield from _walk(field.type, f"{path}.{field.encode_name}".lstrip("."))
        case msgspec.inspect.DictType(value_type=inner) if isinstance(_without_none(inner), msgspec.inspect.StructType):
            yield from _walk(inner, f"{path}.*")
        case msgspec.inspect.VarTupleType(item_type=inner) if isinstance(
            _without_none(inner), msgspec.inspect.StructType
        ):
            yield from _walk(inner, f"{path}[*]")


def _hint_of_value(value: Any, steps: Sequence[str], tree: Mapping[str, Any], root: type) -> str:
    """Return a hint if a wrong value is valid for another setting, or similar to a valid value; else ""."""
    where = [
        (path, names) for path, there in _walk(msgspec.inspect.type_info(root), "") if (names := list_choices(there))
    ]
    pattern = _pattern(steps, root)
    own = [str(one) for path, values in where if path == pattern for one in values]
    others = [path for path, values in where if path != pattern and value in values]
    if others:
        best = max(others, key=lambda path: _count_shared(path, pattern))
        return f"; {value} is a value of {_fill_pattern(best, steps, tree)}"
    near = _nearest(str(value), own, str, most=max(1, len(str(value)) // 3)) or _find_similar_words(
        str(value), own, str
    )
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _nearest(wrong: str, paths: Sequence[str], name: Callable[[str], str], *, most: int) -> list[str]:
    """Return the paths whose name is the fewest edits away from `wrong`, at most `most` edits; ties go to the names that
    share more letters with `wrong`."""
    plain = _plain(wrong)
    far = {
        path: (edit_distance(plain, _plain(name(path))), _other_letters(plain, _plain(name(path)))) for path in paths
    }
    near = {path: distance for path, distance in far.items() if distance[0] <= most and distance[0] < len(plain)}
    return [path for path, distance in near.items() if distance == min(near.values())]


def _find_similar_words(wrong: str, paths: Sequence[str], name: Callable[[str], str]) -> list[str]:
    """Return the paths whose name shares the most words (or word beginnings) with `wrong`, provided that these are at least
    half of the words of either name."""
    words = _words(wrong)

    def common(path: str) -> int:
        return sum(any(_alike(word, other) for other in words) for word in _words(name(path)))

    found = {path: common(path) for path in paths if 2 * common(path) >= min(len(words), len(_words(name(path))))}
    return [path for path, number in found.items() if number and number == max(found.values())]


def _alike(one: str, other: str) -> bool:
    return one == other or (min(len(one), len(other)) >= WORD and one[:WORD] == other[:WORD])


def edit_distance(one: str, other: str) -> int:
    """Return the Damerau-Levenshtein distance: letters to insert, delete, replace or swap with a neighbour."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        row = [i]
        for j, b in enumerate(other, start=1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def _other_letters(one: str, other: str) -> int:
    """Return the number of letters in which two names differ, whatever the letters' order."""
    return sum(abs(one.count(letter) - other.count(letter)) for letter in {*one, *other})


def _plain(name: str) -> str:
    """Return a name in snake case, whatever its style: learningRate, learning-rate or learning_rate."""
    return "_".join(_words(name))


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) if word]


def _initials(name: str) -> str:
    words = _words(name)
    return "".join(word[0] for word in words) if len(words) > 1 else name


def _count_shared(path: str, other: str) -> int:
    """Return how many of their first steps two paths share. Steps with user-chosen names count less."""
    common = 0
    for one, two in zip(path.split("."), other.split("."), strict=False):
        if one != two:
            break
        common += 2
    return common - path.count("*")


def _pattern(steps: Sequence[str], root: type) -> str:
    """Return the path at `steps` in the form of `list_setting_paths`."""
    there, path = msgspec.inspect.type_info(root), ""
    for step in steps:
        chosen = isinstance(_without_none(there), msgspec.inspect.DictType)
        path += "[*]" if step.startswith("[") else f".{'*' if chosen else step}"
        there = _find_type_at(there, "[...]" if chosen else step)
    return path.lstrip(".")


def _fill_pattern(pattern: str, steps: Sequence[str], tree: Mapping[str, Any]) -> str:
    """Replace each `*` in a path by the name that the user wrote, or else by the only name that exists."""
    found: list[str] = []
    for depth, step in enumerate(pattern.split(".")):
        if step == "*":
            there = _get_at(tree, found)
            here = steps[depth] if found == list(steps[:depth]) and depth < len(steps) else None
            only = next(iter(there)) if isinstance(there, dict) and len(there) == 1 else "NAME"
            found.append(here or only)
        else:
            found.append(step)
    return ".".join(found)


def _concrete(complaint: str, steps: Sequence[str], tree: Mapping[str, Any], root: type) -> list[str]:
    """Replace each `[...]` in `steps` by the name of the entry that raises the same complaint when it is converted on its
    own."""
    whole: Any = tree
    found: list[str] = []
    for step in steps:
        if step != "[...]":
            found.append(step)
            continue
        names = _get_at(whole, found)
        for name in names:
            alone = _set_at(whole, found, {name: names[name]})
            if _complaint(alone, root) == complaint:
                whole = alone
                found.append(name)
                break
        else:
            raise AssertionError(f"{complaint} is about none of {', '.join(names)}")
    return found


def _complaint(tree: Any, root: type) -> str:
    try:
        msgspec.convert(tree, root)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _set_at(tree: Any, steps: Sequence[str], value: Any) -> Any:
    """Return a copy of `tree` with `value` at `steps`."""
    if not steps:
        return value
    first, *rest = steps
    if first.startswith("["):
        place = int(first[1:-1])
        return [*tree[:place], _set_at(tree[place], rest, value), *tree[place + 1 :]]
    return {**tree, first: _set_at(tree[first], rest, value)}


def _get_at(tree: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        if step.startswith("["):
            tree = tree[int(step[1:-1])] if isinstance(tree, Sequence) else None
        else:
            tree = tree.get(step) if isinstance(tree, Mapping) else None
    return tree


def _join_steps(steps: Sequence[str]) -> str:
    return "".join(step if step.startswith("[") else f".{step}" for step in steps).lstrip(".")


def _format_short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def _without_none(there: Type) -> Type:
    """Return the type without None. No setting has a union with another type."""
    if isinstance(there, msgspec.inspect.UnionType):
        return next(one for one in there.types if not isinstance(one, msgspec.inspect.NoneType))
    return there


def _find_type_at(there: Type, step: str) -> Type:
    """Return the type found at `step` (a name, `[...]` or `[2]`) of the type `there`."""
    match _without_none(there):
        case msgspec.inspect.StructType(fields=fields):
            return next(_without_none(one.type) for one in fields if one.encode_name == step)
        case msgspec.inspect.DictType(value_type=found) | msgspec.inspect.VarTupleType(item_type=found):
            return _without_none(found)
        case msgspec.inspect.TupleType(item_types=items):
            return _without_none(items[int(step[1:-1])])
        case _:
            raise AssertionError(f"{there} has no {step}")
