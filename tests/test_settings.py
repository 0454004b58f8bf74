import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graven.errors import SpecError
from graven.settings import build, read_toml, table_of


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float
    clip: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    name: str = "name"
    on: bool = False
    order: Literal["second", "first"] = "second"
    inner: Inner = Inner(rate=0.5)
    sizes: tuple[int, ...] = ()
    betas: tuple[float, float] = (0.9, 0.95)
    parts: tuple[Inner, ...] = dataclasses.field(default_factory=tuple)


def test_a_toml_file_becomes_the_dataclass_it_describes(tmp_path):
    place = tmp_path / "spec.toml"
    place.write_text(
        'count = 3\nname = "ü"\non = true\norder = "first"\nsizes = [1, 2]\nbetas = [0, 0.5]\n[inner]\nrate = 2\n[[parts]]\nrate = 0.25\nclip = 1.5\n'
    )
    assert build(Outer, read_toml(place), where="spec") == Outer(
        count=3, name="ü", on=True, order="first", sizes=(1, 2), betas=(0.0, 0.5), inner=Inner(rate=2.0), parts=(Inner(rate=0.25, clip=1.5),)
    )


@dataclass(frozen=True, kw_only=True)
class Other:
    size: int
    kind: Literal["other"] = "other"


@dataclass(frozen=True, kw_only=True)
class Either:
    part: Inner | Other


def test_of_a_union_the_kind_that_a_table_names_is_built_and_the_first_where_it_names_none():
    assert build(Either, {"part": {"kind": "other", "size": 2}}, where="spec") == Either(part=Other(size=2))
    assert build(Either, {"part": {"rate": 2.0}}, where="spec") == Either(part=Inner(rate=2.0))
    assert build(Either, table_of(Either(part=Other(size=2))), where="spec") == Either(part=Other(size=2))
    with pytest.raises(SpecError, match=r"`spec.part.kind` is 'else'; it must be one of 'other'\."):
        build(Either, {"part": {"kind": "else", "size": 2}}, where="spec")


def test_what_is_left_out_keeps_its_default():
    assert build(Outer, {"count": 1}, where="spec") == Outer(count=1)


def test_an_integer_where_a_float_is_wanted_becomes_one():
    assert type(build(Inner, {"rate": 1}, where="inner").rate) is float


@given(
    st.builds(
        Outer,
        count=st.integers(),
        name=st.text(),
        on=st.booleans(),
        order=st.sampled_from(["second", "first"]),
        sizes=st.lists(st.integers()).map(tuple),
        parts=st.lists(st.builds(Inner, rate=st.floats(allow_nan=False), clip=st.none() | st.floats(allow_nan=False))).map(tuple),
    )
)
def test_a_dataclass_survives_the_way_through_json(value):
    assert build(Outer, json.loads(json.dumps(table_of(value))), where="spec") == value


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"count": 1, "cuont": 2}, "`spec` has the unknown key `cuont`; it knows betas, count, inner, name, on, order, parts, sizes."),
        ({}, "`spec` lacks the key `count`; add it."),
        ({"count": "1"}, "`spec.count` is '1'; a value of type int was expected."),
        ({"count": 1.0}, "`spec.count` is 1.0; a value of type int was expected."),
        ({"count": True}, "`spec.count` is True; a value of type int was expected."),
        ({"count": None}, "`spec.count` is None; a value of type int was expected."),
        ({"count": 1, "on": 1}, "`spec.on` is 1; a value of type bool was expected."),
        ({"count": 1, "inner": {"rate": True}}, "`spec.inner.rate` is True; a value of type float was expected."),
        ({"count": 1, "inner": {"rate": 1.0, "clip": "1"}}, "`spec.inner.clip` is '1'; a value of type float was expected."),
        ({"count": 1, "inner": 3}, "`spec.inner` is 3; a table was expected. Write its keys under [spec.inner]."),
        ({"count": 1, "order": "third"}, "`spec.order` is 'third'; it must be one of 'second', 'first'."),
        ({"count": 1, "sizes": [1, "2"]}, "`spec.sizes[1]` is '2'; a value of type int was expected."),
        ({"count": 1, "sizes": 1}, "`spec.sizes` is 1; a list was expected."),
        ({"count": 1, "betas": [0.9]}, "`spec.betas` has 1 entries; 2 were expected."),
        ({"count": 1, "parts": [{"rate": 1.0}, {}]}, "`spec.parts[1]` lacks the key `rate`; add it."),
    ],
)
def test_a_wrong_table_is_one_sentence_that_names_the_key(table, sentence):
    with pytest.raises(SpecError) as caught:
        build(Outer, table, where="spec")
    assert str(caught.value) == sentence


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"cannot read .*none\.toml: No such file or directory\. Give the path of a spec file\."):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize("content", [b"a = \n", b"\xff = 1\n"])
def test_a_file_that_is_no_toml_is_refused_with_its_place(content, tmp_path):
    (tmp_path / "spec.toml").write_bytes(content)
    with pytest.raises(SpecError, match=r"spec\.toml is no TOML file: .+\. Mend that line\."):
        read_toml(tmp_path / "spec.toml")
