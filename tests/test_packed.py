"""Packed linears against F.linear: same numbers, same argmax, at every width, and joined products that never go stale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from draftheads.inference.packed import PackedLinear, PackedSlice, can_pack, pack_linears
from draftheads.inference.target import Target

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch has no oneDNN linear")
ONE = slice(0, 1)


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 128, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 5, 64), (2, 3, 64), (7, 64), (64,), (0, 64)])
def test_packed_linear_equals_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias)
    x = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(pack_linears(linear)(x), linear(x), rtol=0, atol=1e-5)


def test_weights_stay_where_packing_does_not_apply() -> None:
    half = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.ReLU())
    assert type(pack_linears(half)[0]) is nn.Linear
    own = nn.Sequential(nn.Linear(4, 4))
    assert pack_linears(own) is own
    assert isinstance(own[0], PackedLinear)
    assert not list(own.parameters())
    assert not own.state_dict()


def test_without_the_operators_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftheads.inference.packed.can_pack", lambda: False)
    assert type(pack_linears(nn.Sequential(nn.Linear(4, 4)))[0]) is nn.Linear


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_packed_target_equals_plain(family: str) -> None:
    plain, packed = (Target.from_model(tiny.model(family), tiny.tokenizer(), packed=p) for p in (False, True))
    assert any(isinstance(m, PackedLinear) for m in packed.model.modules())
    lm_head_VD = plain.lm_head_VD
    assert torch.equal(packed.lm_head_VD, lm_head_VD), "the original rows stay at hand"
    prompt, more = ids(20), ids(8, 1)
    by_width = {}
    for width in (1, 2, 4, 8):
        cache = packed.new_cache(1, 64)
        packed.extend(cache, ONE, prompt)
        cache.advance(ONE, [20])
        rows = []
        for start in range(0, 8, width):
            rows.append(packed.logits(packed.extend(cache, ONE, more[:, start : start + width])[0])[0])
            cache.advance(ONE, [width])
        by_width[width] = torch.cat(rows)
    with torch.no_grad():
        expected_TV = plain.model(input_ids=torch.cat([prompt, more], 1)).logits[0, 20:]
    for found_TV in by_width.values():
        torch.testing.assert_close(found_TV, expected_TV, rtol=0, atol=1e-4)
        assert torch.equal(found_TV.argmax(-1), expected_TV.argmax(-1))


def test_which_linears_are_joined() -> None:
    joined = {name.rsplit(".", 1)[-1] for name, m in Target.from_model(tiny.model(), tiny.tokenizer(), packed=True).model.named_modules()
              if isinstance(m, PackedSlice)}
    assert joined == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert not any(isinstance(m, PackedSlice) for m in pack_linears(tiny.model()).modules()), "only when a forward was watched"


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.again = nn.Linear(8, 3), nn.Linear(8, 5), nn.Linear(8, 4, bias=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([self.a(x), self.b(x), self.c(x)], -1)
        return y.sum(-1) + self.again(self.again(x)).sum(-1)


def test_joined_products_do_not_go_stale() -> None:
    torch.manual_seed(0)
    net, x = Siblings(), torch.randn(3, 8)
    with torch.no_grad():
        other = torch.randn(3, 8)
        a_other, b_x, b_other, both = net.a(other), net.b(x), net.b(other), [net(x), net(other)]
        pack_linears(net, lambda: net(x))
        assert isinstance(net.b, PackedSlice)
        assert isinstance(net.c, PackedLinear), "no bias: not joined with the others"
        assert isinstance(net.again, PackedLinear), "called twice: not joined"
        for sample, expected in zip([x, other, x], [*both, both[0]], strict=True):
            torch.testing.assert_close(net(sample), expected)
        net.a(x)
        torch.testing.assert_close(net.b(x), b_x)
        net.a(x)  # the first, then a sibling that was given something else
        torch.testing.assert_close(net.b(other), b_other)
        x.copy_(other)  # the same tensor with new content
        torch.testing.assert_close(net.a(x), a_other)
        torch.testing.assert_close(net.b(x), b_other)


@pytest.mark.slow
def test_real_target_is_the_same_at_every_width() -> None:
    pytest.importorskip("gguf")
    target, plain = Target.load("smollm2-135m"), Target.load("smollm2-135m", packed=False)
    assert target.packed
    text = target.tokenizer.apply_chat_template([{"role": "user", "content": "Write a short story about a lighthouse."}], tokenize=False)
    prompt = target.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        expected_TV = plain.model(prompt).logits[0, 16:32]
    for width in (1, 4, 8, 16):
        cache = target.new_cache(1, 64)
        target.extend(cache, ONE, prompt[:, :16])
        cache.advance(ONE, [16])
        rows = []
        for start in range(16, 32, width):
            rows.append(target.logits(target.extend(cache, ONE, prompt[:, start : start + width])[0])[0])
            cache.advance(ONE, [width])
        found_TV = torch.cat(rows)
        torch.testing.assert_close(found_TV, expected_TV, rtol=0, atol=2e-4)
        assert torch.equal(found_TV.argmax(-1), expected_TV.argmax(-1))
