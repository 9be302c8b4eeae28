"""The row store: what is written is what is read, and damage is named."""

from __future__ import annotations

import json
import pickle
import time

import pytest
import torch

from draftheads.data import features
from draftheads.data.features import Row, RowStore, ShardError, bytes_per_token, normalise, restore, row_seed
from draftheads.recipes.schema import RecipeError


def rows(count=7, taps=3, hidden=16, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    for i in range(count):
        length = 2 + i
        yield Row(
            f"r{i}", "math" if i % 2 else "chat", torch.randint(0, 100, (length,), generator=g), torch.arange(length) >= length // 2,
            "length" if i == 3 else "eos", 0.5 * i, 10 + i, torch.randn(length - 1, taps * hidden, generator=g) * scale,
            torch.randn(length - 1, hidden, generator=g), torch.randn(length - 1, generator=g), {"turn": i},
        )


def test_line_separators_inside_a_text_end_no_line(tmp_path):
    row = next(rows())
    row.extra = {"answer": "a\u2028b\x85c\u2029d\n\x0ce"}
    assert [r.extra for r in RowStore.write(tmp_path, [row, row])] == [row.extra] * 2


def test_round_trip(tmp_path):
    store = RowStore.write(tmp_path, rows(), shard_rows=3, counts={"dropped": {"x": 1}})
    assert len(store) == 7
    assert store.lengths == [2 + i for i in range(7)]
    assert store.counts == {"rows": 7, "dropped": {"x": 1}}
    for wanted, found in zip(rows(), store, strict=True):
        for name in ("id", "category", "finish_reason", "temperature", "seed", "extra"):
            assert getattr(wanted, name) == getattr(found, name)
        assert torch.equal(wanted.ids, found.ids)
        assert found.ids.dtype == torch.int64
        assert torch.equal(wanted.flags, found.flags)
        assert found.flags.dtype == torch.bool
        for name in ("features_TF", "final_TD"):
            assert getattr(found, name).dtype == torch.float32
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-3, atol=1e-4)
        assert torch.equal(wanted.lse_T, found.lse_T)
    assert torch.equal(store[-1].ids, store[6].ids)
    with pytest.raises(IndexError):
        store[7]


def test_massive_activations_survive_fp16():
    raw_SF = torch.randn(50, 2 * 576, generator=torch.Generator().manual_seed(0))
    raw_SF[:, 5] = 25_000.0
    raw_SF[:, 600] = 1e7  # far beyond fp16
    unit_SF, rms_SK = normalise(raw_SF, 576)
    assert unit_SF.dtype == torch.float16
    assert rms_SK.shape == (50, 2)
    torch.testing.assert_close(rms_SK, raw_SF.view(50, 2, 576).square().mean(-1).sqrt())  # each tap has its own
    back_SF = restore(unit_SF, rms_SK)
    assert torch.isfinite(back_SF).all()
    assert ((back_SF - raw_SF).abs() <= raw_SF.abs() * 2**-10 + rms_SK.repeat_interleave(576, 1) * 1e-7).all()
    zero, rms = normalise(torch.zeros(2, 8), 8)
    assert torch.equal(restore(zero, rms), torch.zeros(2, 8))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_byte_a_channel_is_as_exact_as_it_says_and_an_outlier_spoils_its_neighbours_only(kind):
    raw_SF = torch.randn(50, 2 * 576, generator=torch.Generator().manual_seed(0))
    raw_SF[:, 5], raw_SF[:, 600] = 25_000.0, 1e7
    small_SF, scale_SG = normalise(raw_SF, 576, kind)
    assert small_SF.element_size() == 1
    assert scale_SG.shape == (50, 2 * 576 // 64)
    scale_SF = scale_SG.repeat_interleave(64, dim=1)
    off_SF = (restore(small_SF, scale_SG) - raw_SF).abs()
    # e4m3: three bits of mantissa, and steps of one size below 2^-6.
    bound_SF = 2.0**-4 * raw_SF.abs().clamp(min=scale_SF * 2.0**-6) if kind == "fp8" else 0.5 * scale_SF
    assert (off_SF <= 1.001 * bound_SF).all()
    assert off_SF[:, 64:576].max() < (0.2 if kind == "fp8" else 0.02)
    zero, scale = normalise(torch.zeros(2, 8), 8, kind)
    assert torch.equal(restore(zero, scale), torch.zeros(2, 8))


@pytest.mark.parametrize("kind", ["fp16", "fp8", "int8"])
def test_a_store_of_any_kind_gives_its_rows_and_those_of_a_choice_of_taps(tmp_path, kind):
    g, D = torch.Generator().manual_seed(0), 128
    some = [Row(f"r{i}", "c", torch.arange(9), torch.ones(9, dtype=torch.bool), features_TF=torch.randn(8, 3 * D, generator=g),
                final_TD=torch.randn(8, D, generator=g), lse_T=torch.zeros(8)) for i in range(5)]
    store = RowStore.write(tmp_path, some, shard_rows=2, states=kind)
    store.taps = [1, 3, 5]
    for row, back in zip(some, store, strict=True):
        for a, b in ((row.features_TF, back.features_TF), (row.final_TD, back.final_TD)):
            assert (a - b).abs().max() < {"fp16": 0.002, "fp8": 0.2, "int8": 0.02}[kind]
    chosen = store.select([5, "final", 1])[3]
    whole = store[3]
    wanted = [whole.features_TF[:, 2 * D :], whole.final_TD, whole.features_TF[:, :D]]
    assert torch.equal(chosen.features_TF, torch.cat(wanted, -1))


def test_same_rows_same_bytes_and_hash(tmp_path):
    one, two = RowStore.write(tmp_path / "a", rows()), RowStore.write(tmp_path / "b", rows())
    other = RowStore.write(tmp_path / "c", rows(seed=1))
    assert one.hash == two.hash != other.hash
    assert (tmp_path / "a/shard-00000.safetensors").read_bytes() == (tmp_path / "b/shard-00000.safetensors").read_bytes()


def test_rows_without_features(tmp_path):
    plain = [Row(r.id, r.category, r.ids, r.flags) for r in rows()]
    store = RowStore.write(tmp_path, plain)
    assert store[2].features_TF is None
    assert store[2].lse_T is None
    mixed = list(rows())
    mixed[1].final_TD = None
    with pytest.raises(ValueError, match="all or none"):
        RowStore.write(tmp_path / "b", mixed)
    wrong = list(rows())
    wrong[1].lse_T = wrong[1].lse_T[:-1]
    with pytest.raises(ValueError, match="r1"):
        RowStore.write(tmp_path / "c", wrong)


@pytest.mark.parametrize("suffix", ["safetensors", "jsonl"])
def test_truncated_shard_is_named(tmp_path, suffix):
    RowStore.write(tmp_path, rows(), shard_rows=3)
    path = tmp_path / f"shard-00001.{suffix}"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ShardError, match="shard-00001"):
        RowStore.open(tmp_path)
    path.unlink()
    with pytest.raises(ShardError, match="missing"):
        RowStore.open(tmp_path)


def test_a_kill_while_a_shard_is_made_again_leaves_no_receipt(tmp_path, monkeypatch):
    RowStore.write(tmp_path, rows(), shard_rows=3)

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(features, "sha256_file", killed)  # the new files are there, their receipt is not
        with pytest.raises(KeyboardInterrupt):
            features.write_shard(tmp_path, "shard-00001", list(rows())[3:6])
    assert features.read_receipt(tmp_path, "shard-00001") is None


def test_flipped_bit_is_found_by_deep_check_and_foreign_shard_always(tmp_path):
    RowStore.write(tmp_path, rows(), shard_rows=3)
    path = tmp_path / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    RowStore.open(tmp_path)
    with pytest.raises(ShardError, match="sha256"):
        RowStore.open(tmp_path, deep=True)
    receipt = json.loads((tmp_path / "shard-00001.json").read_text())
    receipt["sha256"][0] = "0" * 64
    (tmp_path / "shard-00001.json").write_text(json.dumps(receipt))
    with pytest.raises(ShardError, match="manifest"):
        RowStore.open(tmp_path)


def test_a_head_reads_its_taps_of_what_was_captured(tmp_path):
    RowStore.write(tmp_path, rows(), shard_rows=3)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"request": {"taps": [2, 5, 7]}}))
    store = RowStore.open(tmp_path)
    for taps, columns in (([2, 5, 7], [0, 1, 2]), ([5], [1]), ([2, 7], [0, 2]), ([7, 2], [2, 0]), ([5, "final"], [1, 3]), (["final"], [3])):
        for row, whole in zip(store.select(taps), store, strict=True):
            parts = [*whole.features_TF.split(16, -1), whole.final_TD]
            assert torch.equal(row.features_TF, torch.cat([parts[k] for k in columns], -1))
            assert torch.equal(row.final_TD, whole.final_TD) and torch.equal(row.lse_T, whole.lse_T) and torch.equal(row.ids, whole.ids)
    assert store[3].features_TF.shape[1] == 48, "selecting leaves the store as it was"
    with pytest.raises(RecipeError, match=r"holds the states of taps \[2, 5, 7\], the head reads \[3, 5\]: name \[3\] in data.taps"):
        store.select([3, 5])
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"request": {"taps": None}}))
    with pytest.raises(RecipeError, match="states of no taps.*data.features: online"):
        RowStore.open(tmp_path).select(["final"])


def test_missing_store_says_what_to_run(tmp_path):
    with pytest.raises(RecipeError, match="specdec distill"):
        RowStore.open(tmp_path / "nowhere")


def test_store_travels_to_workers(tmp_path):
    store = RowStore.write(tmp_path, rows())
    first = store[0]
    assert torch.equal(pickle.loads(pickle.dumps(store))[0].ids, first.ids)


@pytest.mark.parametrize("kind", ["fp16", "fp8", "int8"])
def test_reading_is_fast_and_estimate_is_close(tmp_path, kind):
    g = torch.Generator().manual_seed(0)
    length, taps, hidden = 257, 4, 576
    big = [Row(f"r{i}", "c", torch.zeros(length, dtype=torch.long), torch.ones(length, dtype=torch.bool),
               features_TF=torch.randn(length - 1, taps * hidden, generator=g), final_TD=torch.randn(length - 1, hidden, generator=g),
               lse_T=torch.zeros(length - 1)) for i in range(32)]
    store = RowStore.write(tmp_path, big, states=kind)
    began = time.process_time()
    for i in range(len(store)):
        store[i]
    assert (time.process_time() - began) / (32 * length) * 90_000 < 10  # seconds for 90k tokens
    size = (tmp_path / "shard-00000.safetensors").stat().st_size
    assert size == pytest.approx(bytes_per_token(taps, hidden, kind) * 32 * length, rel=0.02)


def test_row_seed_is_stable_and_fits_int64():
    assert row_seed(0, "a") == row_seed(0, "a") != row_seed(1, "a") != row_seed(0, "b")
    assert 0 <= row_seed(3, "x") < 2**63
