import resource
import signal
import stat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt
from safetensors.torch import save_file

from graven.errors import OutputError
from graven.report import figure, read_lines, table, write_atomically, write_lines

CELLS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@given(rows=st.lists(st.dictionaries(st.text(), CELLS)))
def test_rows_survive_the_way_through_a_file(rows, tmp_path_factory):
    place = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_lines(place, rows)
    assert read_lines(place) == rows


def test_there_are_no_rows_where_there_is_no_file(tmp_path):
    assert read_lines(tmp_path / "rows.jsonl") == []


def test_a_row_is_one_line_of_json(tmp_path):
    write_lines(tmp_path / "rows.jsonl", [{"a": 1, "b": "x\ny"}, {"a": None}])
    assert (tmp_path / "rows.jsonl").read_text() == '{"a": 1, "b": "x\\ny"}\n{"a": null}\n'


def test_what_is_not_finite_is_null(tmp_path):
    write_lines(tmp_path / "rows.jsonl", [{"a": float("nan"), "b": float("-inf"), "c": 0.5}])
    assert (tmp_path / "rows.jsonl").read_text() == '{"a": null, "b": null, "c": 0.5}\n'


def test_a_written_file_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path):
    place = tmp_path / "a.txt"
    place.write_text("old")
    write_atomically(place, lambda temporary: temporary.write_text("new"))
    assert place.read_text() == "new"
    assert names(tmp_path) == ["a.txt"]


def test_a_private_file_stays_private_when_it_is_replaced(tmp_path):
    place = tmp_path / "a.txt"
    place.write_text("old")
    place.chmod(0o600)
    write_atomically(place, lambda temporary: temporary.write_text("new"))
    assert stat.S_IMODE(place.stat().st_mode) == 0o600


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path):
    place = tmp_path / "a.txt"
    place.write_text("old")

    def write(temporary):
        temporary.write_text("half")
        assert place.read_text() == "old"
        assert temporary.parent == place.parent

    write_atomically(place, write)
    assert place.read_text() == "half"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a bug")])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(error, tmp_path):
    place = tmp_path / "a.txt"
    place.write_text("old")

    def write(temporary):
        temporary.write_text("half")
        raise error

    with pytest.raises((OutputError, RuntimeError)) as caught:
        write_atomically(place, write)
    assert place.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]
    if isinstance(error, OSError):
        assert str(caught.value) == f"cannot write {place}: No space left on device. Free some space or choose another place."


@pytest.mark.parametrize(
    "write", [lambda path: save_file({"x": torch.zeros(10_000)}, path), lambda path: path.write_bytes(bytes(40_000))], ids=["tensors", "bytes"]
)
def test_a_file_that_the_disk_does_not_take_is_an_output_error(write, tmp_path):
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OutputError, match=r"^cannot write .*a\.bin: .*File too large.*\. Free some space or choose another place\.$"):
            write_atomically(tmp_path / "a.bin", write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == []


def test_a_missing_folder_is_refused(tmp_path):
    place = tmp_path / "none" / "a.txt"
    with pytest.raises(OutputError) as caught:
        write_atomically(place, lambda temporary: temporary.write_text("x"))
    assert str(caught.value) == f"cannot write {place}: No such file or directory. Choose a folder that exists and that you may write to."


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OutputError, match="Is a directory"):
        write_atomically(tmp_path / "a", lambda temporary: temporary.write_text("x"))
    assert names(tmp_path) == ["a"]


def test_a_file_is_as_readable_as_any_that_the_user_makes(tmp_path):
    (tmp_path / "usual").write_text("x")
    write_lines(tmp_path / "rows.jsonl", [])
    usual, made = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "rows.jsonl"))
    assert made == usual


def test_a_table_has_a_line_for_each_row_and_an_empty_cell_for_what_was_not_measured():
    rows = [{"pairs": 8, "steps": 1, "x": 0.5}, {"pairs": 4, "steps": 1, "x": 0.25}, {"pairs": 8, "steps": 10, "x": 1.0}]
    assert table(rows, row="pairs", column="steps", value=lambda row: f"{row['x']:.0%}") == (
        "| pairs | 1 | 10 |\n"
        "|---|---|---|\n"
        "| 4 | 25% |  |\n"
        "| 8 | 50% | 100% |"
    )  # fmt: skip


def test_a_figure_is_saved_when_the_block_ends_and_closed(tmp_path):
    with figure(tmp_path / "f.png", columns=2) as axes:
        assert len(axes) == 2
        axes[1].plot([1, 2])
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert plt.get_fignums() == []


def test_a_figure_whose_drawing_fails_is_closed_and_not_saved(tmp_path):
    with pytest.raises(ZeroDivisionError), figure(tmp_path / "f.png"):
        _ = 1 / 0
    assert names(tmp_path) == []
    assert plt.get_fignums() == []
