"""What recipes and command lines say about trees: every spelling read, every mistake refused in one line that says what would be right."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftheads.inference.drafters.base import Plan
from draftheads.inference.shapes import MOST_NODES, Dynamic, Sampled, Shape, Static, parse_shape
from draftheads.recipes.schema import RecipeError


@pytest.mark.parametrize(("text", "expected"), [
    ("chain", None), (" chain ", None),
    ("dynamic", Dynamic()), ("dynamic:", Dynamic()), ("dynamic:depth=6", Dynamic(depth=6)),
    ("dynamic:top_k=10, nodes=60,depth=5", Dynamic(5, 10, 60)),
    ("sampled", Sampled()), ("sampled:3,2,1", Sampled((3, 2, 1))), ("sampled: 4", Sampled((4,))),
    ("static:0;1;0,0", Static(((0,), (1,), (0, 0)))), ("static: 0 ; 2 ; 0, 1", Static(((0,), (2,), (0, 1)))),
])
def test_every_spelling_is_read(text: str, expected: Shape | None) -> None:
    assert parse_shape(text) == expected


@pytest.mark.parametrize(("text", "words"), [
    ("", ["chain", "dynamic:", "static:", "sampled:"]), ("bush", ["bush", "chain"]), ("chain:4", ["chain:4"]),
    ("static", ["static"]), ("Dynamic", ["chain"]), ("dynamic:depth", ["depth"]), ("dynamic:depth=", ["dynamic"]),
    ("dynamic:depth=x", ["'x'"]), ("dynamic:depth=2.5", ["2.5"]),
    ("dynamic:width=3", ["width", "depth, top_k, nodes"]), ("dynamic:depth=0", ["at least 1"]),
    ("dynamic:top_k=-1", ["at least 1"]), ("dynamic:depth=1,top_k=3,nodes=4", ["only 3 nodes", "lower nodes"]),
    ("dynamic:depth=40,top_k=8,nodes=9", ["312", "256", "lower depth"]),
    ("dynamic:depth=9,top_k=9,nodes=257", ["257", "256"]), ("dynamic:depth=2,depth=3", ["depth", "twice"]),
    ("sampled:3,0", ["at least 1"]), ("sampled:3,,1", ["sampled"]), ("sampled:a", ["'a'"]),
    ("sampled:9,9,9", ["nodes", "256"]), ("sampled:-1", ["at least 1"]), ("static:0,0", ["[0, 0]", "[0]"]),
    ("static:0;0", ["different"]), ("static:0;-1", ["from 0 on"]), ("static:0;;1", ["static"]), ("static:a", ["'a'"]),
    ("static:" + ";".join(map(str, range(257))), ["257", "256"]),
])
def test_every_mistake_is_one_line(text: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        parse_shape(text)
    assert "\n" not in str(error.value) and all(w in str(error.value) for w in words), str(error.value)


def test_files_of_choices(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    expected = Static(((0,), (1,), (0, 0)))
    for written in ([[0], [1], [0, 0]], {"choices": [[0], [1], [0, 0]], "expected_tau": 1.7}):
        file.write_text(json.dumps(written))
        assert parse_shape(f"static:{file}") == expected
    for wrong in ({"paths": [[0]]}, {"choices": 3}, 7, [[0], "1"], [0, 1], [["0"]], [[0.0]], [[True]], [[]], [], None, [[0, 1]]):
        file.write_text(json.dumps(wrong))
        with pytest.raises(RecipeError) as error:
            parse_shape(f"static:{file}")
        assert "\n" not in str(error.value)
    file.write_text("{")
    for path in (file, tmp_path / "absent.json", tmp_path):
        with pytest.raises(RecipeError) as error:
            parse_shape(f"static:{path}" if path != tmp_path else f"static:{path}.json")
        assert "\n" not in str(error.value) and str(path) in str(error.value)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_nodes_and_depth_of_sampled_trees(widths: list[int]) -> None:
    levels = [1]
    for width in widths:
        levels.append(levels[-1] * width)
    if sum(levels) - 1 > MOST_NODES:
        with pytest.raises(RecipeError):
            Sampled(tuple(widths))
        return
    shape = Sampled(tuple(widths))
    assert shape.nodes == sum(levels) - 1 and shape.depth == len(widths) and parse_shape("sampled:" + ",".join(map(str, widths))) == shape


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8), st.randoms())
def test_the_order_of_static_paths_is_by_level_then_rank(leaves: list[tuple[int, ...]], rng: object) -> None:
    paths = [*{leaf[: i + 1] for leaf in leaves for i in range(len(leaf))}]
    rng.shuffle(paths)  # type: ignore[attr-defined]
    shape = Static(tuple(paths))
    assert shape.nodes == len(paths) and shape.depth == max(map(len, leaves))
    assert set(shape.ordered) == set(paths)
    assert all(len(a) < len(b) or (len(a) == len(b) and a < b) for a, b in zip(shape.ordered, shape.ordered[1:], strict=False))
    assert parse_shape("static:" + ";".join(",".join(map(str, p)) for p in paths)) == shape


def test_shapes_are_plain_hashable_data() -> None:
    """The plan of a round is a key: two equal ones are the same."""
    for make in (lambda: Static(((0,), (0, 1))), lambda: Dynamic(3, 4, 8), lambda: Sampled((2, 1)), lambda: None):
        assert hash(Plan(3, tree=make())) == hash(Plan(3, tree=make())) and Plan(3, tree=make()) == Plan(3, tree=make())
    static = Static(((0,), (0, 1)))
    assert static.ordered  # computed, kept, and no part of the value
    assert static == Static(((0,), (0, 1))) and hash(static) == hash(Static(((0,), (0, 1))))
    with pytest.raises(FrozenInstanceError):
        static.choices = ()  # type: ignore[misc]


def test_a_plan_knows_how_deep_and_how_wide_it_is() -> None:
    assert (Plan(5).depth, Plan(5).drafts) == (5, 5)
    for shape, depth, nodes in ((Static(((0,), (1,), (0, 0))), 2, 3), (Dynamic(5, 8, 24), 5, 24), (Sampled((3, 2)), 2, 9)):
        assert (Plan(9, tree=shape).depth, Plan(9, tree=shape).drafts) == (depth, nodes)
