"""The files that a model's weights are in, and whether they are whole: from their headers, without loading any."""

from __future__ import annotations

from pathlib import Path

import msgspec

from swarmq.errors import EngineError

INDEX_FILE = "model.safetensors.index.json"
LENGTH_FIELD_BYTES = 8
"""Of the header's length, which a file begins with."""


class TensorHeader(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int] = (0, 0)
    """From the header's end on; the entry that is no tensor has none."""


class SafetensorsIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    """Weight -> file."""


_header_decoder = msgspec.json.Decoder(dict[str, TensorHeader])


def find_weight_files(folder: Path) -> list[Path]:
    """Where there is an index, the files in it, and not others that lie beside them."""
    index = folder / INDEX_FILE
    named = (
        msgspec.json.decode(index.read_bytes(), type=SafetensorsIndex).weight_map.values() if index.is_file() else ()
    )
    return [folder / name for name in sorted(set(named))] or sorted(folder.glob("*.safetensors"))


def check_weight_files(folder: Path) -> None:
    """Raises EngineError where there are none, or one is missing or not whole."""
    try:
        files = find_weight_files(folder)
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineError(f"{folder / INDEX_FILE} cannot be read ({error}): fetch it again") from error
    if not files:
        raise EngineError(f"{folder} has no weights (*.safetensors): save the model with save_pretrained()")
    for file in files:
        try:
            if damage := _find_damage(file):
                raise EngineError(f"{file} is not whole: {damage}; fetch it again")
        except OSError as error:
            raise EngineError(f"{file} cannot be read ({error.strerror}): fetch it again") from error


def _find_damage(file: Path) -> str:
    """Empty for a whole file."""
    size = file.stat().st_size
    with file.open("rb") as source:
        length = int.from_bytes(source.read(LENGTH_FIELD_BYTES), "little")
        if size < LENGTH_FIELD_BYTES + length:
            return f"it ends within its header ({size} bytes)"
        try:
            tensors = _header_decoder.decode(source.read(length))
        except msgspec.MsgspecError as error:
            return f"its header is none ({error})"
    expected = LENGTH_FIELD_BYTES + length + max((each.data_offsets[1] for each in tensors.values()), default=0)
    return f"it has {size} bytes, and by its header {expected}" if size != expected else ""
