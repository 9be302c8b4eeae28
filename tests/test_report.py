"""The report from synthetic records: figures, schema, and a page that nothing in it can break out of."""

from __future__ import annotations

import html.parser
import json
import re
import xml.etree.ElementTree

import jsonschema
import pytest

from draftheads.eval.cost_model import Costs
from draftheads.eval.records import TRANSFORMERS, Block, Journal
from draftheads.eval.report.html import render_html
from draftheads.eval.report.markdown import render_markdown
from draftheads.eval.report.tables import COLUMNS, main_rows
from draftheads.eval.summary import Evidence, build_report, schema
from draftheads.inference.measure import Timed
from draftheads.inference.requests import Completion, Request, RoundStat

SETTING = {"temperature": 0.0, "batch_size": 1, "device": "cpu", "dtype": "float32"}
HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7*7 }}\"'&amp;"


def timed(accepted: list[int], gamma: int, seconds: float, source: str, name: str = "p") -> Timed:
    rounds = [RoundStat(gamma, gamma, a, a + 1, source if gamma else "none") for a in accepted]
    tokens = list(range(10, 11 + sum(a + 1 for a in accepted)))
    return Timed([Completion(Request(name, ()), tokens, "length", rounds)], seconds, 0.1)


def block(index: int, category: str, *, speed: float = 2.0, verdict: str = "identical") -> Block:
    """A chain of 4 that accepted 0, 2 and 4 drafts (9 tokens) against 9 single steps of one second."""
    name = f"{category}-{index}"
    found = Block(index, category, [name], [5])
    found.runs = {
        "none": timed([0] * 9, 0, 9.0, "none", name), "ngram": timed([0, 2, 4], 4, 6.0, "ngram", name),
        "head": timed([0, 2, 4], 4, 9 / speed, "head", name), "composite": timed([0, 2, 4], 4, 9 / speed, "head", name),
        TRANSFORMERS: timed([0] * 9, 0, 10.0, "none", name),
    }
    for other in ("ngram", "head", "composite"):
        at = {"position": None, "expected": None, "found": None, "gap": None, "bound": None}
        if verdict != "identical" and other == "head":
            at = {"position": 3, "expected": 7, "found": 8, "gap": 1e-4 if verdict == "tie" else 0.5, "bound": 1e-3}
        found.differences.append({"id": name, "category": category, "pair": f"none/{other}",
                                  "verdict": verdict if other == "head" else "identical", **at})
    return found


def evidence(blocks: list[Block], **changes) -> Evidence:
    gamma = {"ngram": {"ngram": 4}, "head": {"head": 4}, "composite": {"ngram": 4, "head": 4}}
    costs = Costs(1.0, (1.0, 1.1, 1.2, 1.3, 1.4), {"head": 0.1}, {"head": 0.05}, (1, 2, 3, 5))
    return Evidence(blocks, ["none", "ngram", "head", "composite"], gamma, 4, SETTING, costs=costs, bootstrap=200, **changes)


def report(blocks: list[Block], trace: list | None = None, **changes) -> dict:
    provenance = {"date": "2026-01-01", "versions": {"torch": "2"}, "hardware": {"cpu": "x"}, "threads": 1, "target": {"name": "tiny"},
                  "checkpoint": {"name": "head"}, "recipe_hash": None}
    return build_report(evidence(blocks, **changes), settings={"seed": 0}, provenance=provenance, trace=trace)


BLOCKS = [block(0, "math"), block(1, "code"), block(2, "math")]


def test_trace_0_2_4_gives_tau_3_and_rate_one_half():
    """Chain of 4 with 0, 2, 4 accepted: τ 3, acceptance rate 6/12; named and defined in the report."""
    found = report(BLOCKS)
    for figures in (found["summary"], found["by_category"]["math"], found["by_drafter"]["head"], found["by_drafter"]["head"]["by_category"]["code"]):
        assert figures["tau"] == figures["tau_macro"] == pytest.approx(3.0)
        assert figures["acceptance_rate"] == pytest.approx(0.5)
        assert figures["acceptance_per_position"] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])
        assert figures["conditional_acceptance"] == pytest.approx([2 / 3, 1.0, 0.5, 1.0])
    assert found["by_drafter"]["none"]["tau"] == 1.0
    assert {"tau", "acceptance_rate", "acceptance_per_position", "speedup"} <= found["definitions"].keys()


def test_speedups_are_ratios_of_decode_throughput():
    found = report(BLOCKS)
    s = found["summary"]
    assert s["speedup"] == pytest.approx(2.0)
    assert s["speedup_ci95"] == pytest.approx([2.0, 2.0])
    assert s["baseline_tokens_per_s"] == pytest.approx(1.0)
    assert s["baseline_vs_transformers"] == pytest.approx(10 / 9)
    assert s["speedup_vs_transformers"] == pytest.approx(20 / 9)
    assert found["by_drafter"]["ngram"]["speedup"] == pytest.approx(1.5)
    assert found["by_drafter"]["none"]["speedup"] == pytest.approx(1.0)


def test_report_follows_its_schema_and_schema_bites():
    found = report(BLOCKS, trace=[{"id": "a", "category": "c", "prompt": "p", "drafter": "head", "tau": 2.0, "finish_reason": "eos",
                                   "rounds": [{"source": "head", "drafted": 1, "accepted": 1, "pieces": ["a", "b"]}]}])
    validator = jsonschema.Draft202012Validator(schema())
    validator.validate(json.loads(json.dumps(found)))
    for key in ("tau", "speedup_ci95", "lossless", "prompts", "dtype"):
        broken = json.loads(json.dumps(found))
        del broken["by_drafter"]["head"]["by_category"]["math"][key]
        assert list(validator.iter_errors(broken)), key
    empty = report([])
    validator.validate(json.loads(json.dumps(empty)))
    assert empty["summary"]["tau"] is None
    render_html(empty), render_markdown(empty)


def test_unexplained_divergence_fails_and_tie_does_not():
    tied = report([*BLOCKS, block(3, "math", verdict="tie")])
    assert tied["ok"]
    assert tied["by_drafter"]["head"]["lossless"] is True
    assert [d["verdict"] for d in tied["losslessness"]["divergences"]] == ["tie"]
    bad = report([*BLOCKS, block(3, "math", verdict="unexplained")])
    assert not bad["ok"]
    assert bad["by_drafter"]["head"]["lossless"] is False
    assert bad["by_drafter"]["head"]["by_category"]["code"]["lossless"] is True
    assert bad["by_drafter"]["ngram"]["lossless"] is True
    assert "failed" in bad["verdict"]


def test_speedup_above_tau_is_an_error_at_batch_1_only():
    fast = [block(i, "math", speed=3.2) for i in range(6)]
    assert not report(fast)["ok"]
    assert report(fast[:5])["ok"], "too few prompts for an interval that accuses"
    assert "impossible" in report(fast)["problems"][0]
    assert report([block(i, "math", speed=3.05) for i in range(6)])["ok"]
    wide = evidence(fast)
    wide.setting = {**SETTING, "batch_size": 4}
    assert build_report(wide, settings={}, provenance=report(fast)["provenance"])["ok"]


def test_prediction_from_rounds_uses_measured_costs():
    predicted = report(BLOCKS)["cost_model"]["predicted"]["head"]
    # Three rounds of 4 drafts: 9 tokens in 3 · (4·0.1 + 1.4 + 0.05) steps.
    assert predicted["from_rounds"] == pytest.approx(9 / (3 * 1.85))
    assert predicted["measured"] == pytest.approx(2.0)


def test_expected_tau_stands_beside_the_measured_one():
    found = report(BLOCKS, expected={"tau": 3.3, "gamma": 4, "source": "training", "accuracy_per_step": [0.8] * 4})
    assert found["expected"]["measured_tau"] == pytest.approx(3.0)
    shorter = report(BLOCKS, expected={"tau": 2.6, "gamma": 2, "source": "training"})
    assert shorter["expected"]["measured_tau"] == pytest.approx((1 + 3 + 3) / 3)
    assert report(BLOCKS, expected={"tau": 4.0, "gamma": 6, "source": "training"})["expected"]["measured_tau"] is None
    assert found["at_tau_gamma"]["by_drafter"]["head"]["tau"] == pytest.approx(3.0)


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_page_is_one_file_without_scripts_and_escapes_what_the_model_wrote():
    hostile = block(0, HOSTILE, verdict="tie")
    hostile.differences[1] |= {"expected_text": HOSTILE, "found_text": HOSTILE, "id": HOSTILE}
    trace = [{"id": HOSTILE, "category": HOSTILE, "prompt": HOSTILE, "drafter": "composite", "tau": 2.0, "finish_reason": "eos",
              "rounds": [{"source": "head\" onclick=\"x", "drafted": 1, "accepted": 1, "pieces": [HOSTILE, HOSTILE]}]}]
    page = render_html(report([hostile, block(1, "math")], trace=trace))
    parser = Tags()
    parser.feed(page)
    names = {tag for tag, _ in parser.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "base", "form"}
    assert not [a for _, attrs in parser.tags for a in attrs if a.startswith("on") or a in ("src", "href")]
    assert "{{ 7*7 }}" in page
    assert "&lt;/script&gt;&lt;img" in page
    assert "svg" in names
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    text = render_markdown(report([hostile], trace=trace))
    assert "<img" not in text


def test_drawings_are_well_formed_and_stay_on_their_canvas():
    named = [("math", 0.5), ("<code> & more than fits", 2.9), ("math", 0.7)]
    page = render_html(report([block(i, name, speed=s) for i, (name, s) in enumerate(named)]))
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawings) == 5
    for drawing in drawings:
        root = xml.etree.ElementTree.fromstring(drawing)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for item in root.iter():
            for names, limit in ((("x", "cx", "x1", "x2"), width), (("y", "cy", "y1", "y2"), height)):
                assert all(0 <= float(item.attrib.get(name, 0)) <= limit for name in names), (item.tag, item.attrib)


def test_trace_colours_say_who_drafted():
    rounds = [{"source": "ngram", "drafted": 3, "accepted": 2, "pieces": ["A", "B", "C"]},
              {"source": "head", "drafted": 2, "accepted": 1, "pieces": ["D", "E"]}, {"source": "none", "drafted": 0, "accepted": 0, "pieces": ["F"]}]
    trace = [{"id": "a", "category": "c", "prompt": "p", "drafter": "composite", "tau": 2.0, "finish_reason": "eos", "rounds": rounds}]
    page = render_html(report(BLOCKS, trace=trace))
    spans = re.findall(r'<span class="(ngram|head|new)">([A-F])</span>', page)
    assert spans == [("ngram", "A"), ("ngram", "B"), ("new", "C"), ("head", "D"), ("new", "E"), ("new", "F")]


def test_terminal_table_has_both_baselines():
    rows = main_rows(report(BLOCKS))
    assert [len(r) for r in rows] == [len(COLUMNS)] * 5
    assert [r[0] for r in rows] == ["none", "n-gram", "head", "n-gram + head", "transformers"]
    assert rows[3][COLUMNS.index("vs none")] == "2.00×"
    assert rows[3][COLUMNS.index("vs transformers")] == "2.22×"


def test_labels_say_what_copies_and_what_grew_a_tree():
    tree = {"tree": "sampled:2,1", "grown_by": ["head", "composite"], "copy_first": "suffix", "draft_model": None}
    found = report(BLOCKS, drafting=tree)
    jsonschema.Draft202012Validator(schema()).validate(found)
    rows = {r[0]: r[COLUMNS.index("γ")] for r in main_rows(found)}
    assert rows == {"none": "–", "n-gram": "4", "head": "4, tree", "suffix + head": "4, 4, tree", "transformers": "–"}
    assert "suffix first, else the head" in found["verdict"]
    assert "tree sampled:2,1" in render_html(found) and "tree sampled:2,1" in render_markdown(found)
    assert "tree" not in {r[COLUMNS.index("γ")] for r in main_rows(report(BLOCKS))}


def test_advice_by_category():
    found = report(BLOCKS)
    assert found["advice"]["math"]["use"] == "head"  # as fast as both together, and simpler
    slow = report([block(i, "math", speed=0.8) for i in range(3)])
    assert slow["advice"]["math"]["use"] == "n-gram"
    assert report([block(0, "math")])["advice"]["math"]["use"] == "nothing"  # one prompt proves nothing


def test_journal_resumes_whole_lines_of_the_same_settings_only(tmp_path):
    path = tmp_path / "records.jsonl"
    journal = Journal(path, {"gamma": 4})
    journal.append("block", block(0, "math").to_json())
    journal.append("block", block(1, "code").to_json())
    with open(path, "a") as handle:
        handle.write('{"kind": "block", "ind')  # killed here
    again = Journal(path, {"gamma": 4})
    assert [Block.from_json(e).category for e in again.of("block")] == ["math", "code"]
    again.append("block", block(2, "math").to_json())
    third = Journal(path, {"gamma": 4})
    found = [Block.from_json(e) for e in third.of("block")]
    assert [b.to_json() for b in found] == [block(0, "math").to_json(), block(1, "code").to_json(), block(2, "math").to_json()]
    assert report(found)["summary"] == report(BLOCKS[:2] + [block(2, "math")])["summary"]
    assert Journal(path, {"gamma": 5}).entries == []
    assert len(path.read_text().splitlines()) == 1
