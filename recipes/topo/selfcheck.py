"""Checks of this recipe on a CPU, with a tiny untrained model; about ten seconds.

    python -m recipes.topo.selfcheck

Each check compares with an independent way to the same figure: `transformers`, a full forward, a direct loop.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreload.backend.predict.calibration import Calibration, CalibrationMeta
from foreload.backend.predict.network import Estimator
from foreload.backend.predict.recall import recalled
from foreload.backend.quality import Loss
from recipes.train.config import Config
from recipes.train.data import Windows
from recipes.train.export import END_ID, export, round_to_bf16
from recipes.train.grouped import GroupedExperts
from recipes.train.model import Model

from .calibrate import default_vectors
from .decode import Decoder, Sampler
from .live import Live, State
from .predictors import Predictor, Speculation
from .quality import report
from .verify import NgramDraft, ngram, verify

CONFIG = Path(__file__).parent.parent / "train/configs/tiny_topo.json"
TOKENIZER = Path("foreload/assets/mini")


def _close(name: str, ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    difference = float((ours - theirs).detach().abs().max())
    if not difference <= tolerance:
        raise AssertionError(f"{name}: differs by {difference}")
    print(f"{name}: within {difference:.1e}")


def _equal(name: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise AssertionError(f"{name}: {ours} is not {theirs}")
    print(f"{name}: equal")


def tiny() -> tuple[Config, Model, Live]:
    """An untrained model with weights large enough that routing and text vary."""
    torch.manual_seed(3)
    config = Config.load(CONFIG)
    model = round_to_bf16(Model(config.model)).requires_grad_(False)
    for block in model.blocks:
        mlp = block.mlp
        assert isinstance(mlp, GroupedExperts)
        mlp.router.mul_(16)
        mlp.down.mul_(4)
    model.embedding.mul_(4)
    return config, model, Live(model, torch.device("cpu"), torch.float32)


def check_grouped() -> None:
    """Training's experts and their gradients against a loop over tokens."""
    config, _, _ = tiny()
    layer = GroupedExperts(config.model)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(24, config.model.hidden, requires_grad=True)
    weights, ids = functional.linear(x, layer.router).softmax(-1).topk(config.model.top_k, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    rows = []
    for t in range(len(x)):
        parts = [
            w * ((functional.silu(x[t] @ layer.gate[e]) * (x[t] @ layer.up[e])) @ layer.down[e])
            for e, w in zip(ids[t], weights[t], strict=True)
        ]
        rows.append(torch.stack(parts).sum(0))
    direct, ours = torch.stack(rows), layer(x)[0]
    _close("grouped experts", ours, direct, 1e-4)
    mix, wanted = torch.randn_like(ours), [x, layer.router, layer.gate, layer.up, layer.down]
    pairs = zip(torch.autograd.grad((ours * mix).sum(), wanted),
                torch.autograd.grad((direct * mix).sum(), wanted), strict=True)  # fmt: skip
    _close("their gradients", torch.cat([(a - b).flatten() for a, b in pairs]), torch.zeros(1), 1e-3)


def check_forward(config: Config, model: Model, live: Live) -> None:
    """The parts of a forward against the training model, grouped against gathered experts, and `transformers`."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(1, 4096, (2, 40), generator=torch.Generator().manual_seed(1))
    states: list[State] = []
    logits = live.logits(live.forward(ids, visit=states.append))
    _close("logits against training's", logits, model.logits(model(ids, torch.float32)[0], torch.float32), 1e-3)
    state = states[1]
    rows, order = live.expert_rows(1, state.h, state.ids)
    sorted_back = torch.empty_like(rows).index_copy_(0, order, rows).view(*state.ids.shape, -1)
    grouped = (sorted_back * state.weights[..., None]).sum(1)
    _close("grouped against gathered", grouped, live.experts(1, state.h, state.ids, state.weights))
    with tempfile.TemporaryDirectory() as folder:
        export(config, model, TOKENIZER, Path(folder))
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = reference(ids, output_router_logits=True)
    _close("logits against transformers", logits, out.logits, 2e-3)
    kept = _decoded(live, ids[:, :8], 20)
    sequence = torch.cat([ids[:, :8], kept.fed[0, :, :, 0].T], 1)
    routers = reference(sequence, output_router_logits=True).router_logits
    theirs = torch.stack([r.view(2, 28, -1)[:, 8:].topk(config.model.top_k, -1).indices for r in routers])
    ours = kept.ids.view(20, config.model.layers, 2, -1).permute(1, 2, 0, 3).long()
    _equal("recorded ids against transformers", ours.sort(-1)[0].tolist(), theirs.sort(-1)[0].tolist())


def _decoded(live: Live, prompts: Tensor, steps: int) -> Decoder:
    rows, prompt = prompts.shape
    decoder = Decoder(live, rows, 1, prompt + steps + 1, steps)
    logits, _, _ = decoder.prefill(prompts)
    given = torch.full((steps + 1, rows), -1)
    sampler = Sampler(decoder, [5, 6][:rows], steps, 0.8, given, END_ID)
    decoder.tokens.copy_(sampler.draw(logits, decoder.at)[:, None])
    decoder.positions.fill_(prompt)
    decoder.after = sampler
    for _ in range(steps):
        decoder.step()
    return decoder


def check_decode(live: Live) -> None:
    """Batched decode against one full forward over the tokens it produced, and against decoding alone."""
    prompts = torch.randint(1, 4096, (2, 10), generator=torch.Generator().manual_seed(2))
    decoder = _decoded(live, prompts, 16)
    sequence = torch.cat([prompts, decoder.fed[0, :, :, 0].T], 1)
    states: list[State] = []
    logits = live.logits(live.forward(sequence, visit=states.append))
    _close("decode against full forward", decoder.logits[:, -1], logits[:, -1], 1e-3)
    full = torch.stack([s.ids.view(2, 26, -1)[:, 10:] for s in states], 0)
    ours = decoder.ids.view(16, live.c.layers, 2, -1).permute(1, 2, 0, 3).long()
    _equal("decoded ids", ours.tolist(), full.tolist())
    _equal("a sequence alone", _decoded(live, prompts[:1], 16).fed[0, :, 0].tolist(), decoder.fed[0, :, 0].tolist())


def check_verify(live: Live) -> None:
    """Speculative decoding against plain greedy decoding, token by token."""
    prompts = torch.randint(1, 4096, (2, 12), generator=torch.Generator().manual_seed(4))
    done = verify(live, prompts, [NgramDraft(), NgramDraft()], 4, 12, 100)
    for row in range(2):
        sequence, emitted = prompts[row].tolist(), []
        for step in range(12):
            emitted += done.kept.tokens[step, row, : int(done.accepted[step, row]) + 1].tolist()
        for token in emitted:
            best = int(live.logits(live.forward(torch.tensor([sequence])))[0, -1].argmax())
            _expect(best == token, f"greedy token {len(sequence)} of row {row}: {token} is not {best}")
            sequence.append(token)
    print("speculative decoding: equals greedy decoding")
    texts = []
    for gamma in (0, 3):
        drawn = verify(live, prompts[:1], [NgramDraft()], gamma, 16, 100, temperature=0.3, seeds=[8])
        runs = zip(drawn.kept.tokens[:, 0].tolist(), drawn.accepted[:, 0].tolist(), strict=True)
        texts.append([token for window, count in runs for token in window[: count + 1]][:16])
    _equal("sampled speculative decoding, with and without drafts", texts[1], texts[0])
    _equal("n-gram", ngram([1, 2, 3, 9, 1, 2, 3], 3), [9, 1, 2])
    _equal("n-gram, periodic", ngram([7, 5, 5], 4), [5, 5, 5, 5])


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def check_calibration(live: Live) -> None:
    """Default vectors against a direct mean; unseen experts zero."""
    windows = Windows(torch.arange(1, 4000).numpy(), torch.device("cpu"), 1)
    ids = windows.batch(2, 32)[0]
    dv, counts = default_vectors(live, lambda: ids, 64)
    states: list[State] = []
    live.forward(ids, visit=states.append)
    state, w = states[2], live.layers[2]
    for expert in range(live.c.experts):
        of = (state.ids == expert).any(-1)
        _expect(int(of.sum()) == int(counts[2, expert]), "tokens per expert")
        gate, up = (state.h[of] @ w.gate_up[expert]).chunk(2, -1)
        direct = ((functional.silu(gate) * up) @ w.down[expert]).mean(0) if of.any() else torch.zeros(live.c.hidden)
        _expect(torch.allclose(dv[2, expert], direct, atol=1e-5), f"default vector of expert {expert}")
    print("default vectors: equal to the direct mean")


def check_measures(live: Live) -> None:
    """A perfect predictor, speculation with an empty mask, and quality of a model against itself."""
    ids = torch.tensor([[1, 2], [3, 0]])
    share = torch.tensor([[0.6, 0.4], [0.7, 0.3]])
    _equal("perfect recall", [float(x) for x in recalled(ids, ids, share, 5)], [2.0, 2.0])
    half = recalled(torch.tensor([[1, 4], [3, 1]]), ids, share, 5)
    _close("half recall", torch.stack(half), torch.tensor([1.0, 1.3]))
    tokens = torch.randint(1, 4096, (1, 20), generator=torch.Generator().manual_seed(6))
    dv = torch.randn(live.c.layers, live.c.experts, live.c.hidden)
    c = live.c
    meta = CalibrationMeta(
        model="tiny", weights_hash="", moe_layers=c.layers, experts=c.experts, hidden=c.hidden, texts=(), tokens={},
        seed=0, unseen_experts=0, estimator={}, hybrid=(), recall={}, software={},
    )  # fmt: skip
    estimator = Estimator(c.hidden, c.experts, c.layers).requires_grad_(False)
    predictor = Predictor(live, Calibration(meta, dv, torch.zeros(c.layers, c.hidden), estimator))
    ids, share = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[0.6, 0.4], [0.7, 0.3]])
    gathered = (dv[1][ids] * share[..., None]).sum(1)
    _close("weighted default vectors", predictor.calibration.default(1, ids, share), gathered)
    kinds = [None, *["quasi_hidden"] * (live.c.layers - 1)]
    exact = live.logits(live.forward(tokens))
    same = live.logits(live.forward(tokens, choose=Speculation(predictor, kinds, torch.zeros(20, dtype=torch.bool))))
    _close("speculation of no token", same, exact, 0.0)
    other = live.logits(live.forward(tokens, choose=Speculation(predictor, kinds)))
    _expect(not torch.equal(other, exact), "speculation of all tokens changes the output")
    loss = Loss(torch.device("cpu"))
    loss.add(exact[0, :-1], exact[0, :-1], tokens[0, 1:])
    direct = functional.cross_entropy(exact[0, :-1], tokens[0, 1:]).exp()
    _close("perplexity", torch.tensor(report(loss)["perplexity"]) / direct, torch.tensor(1.0), 1e-4)
    _equal("agreement and KL with itself", (report(loss)["top1_agreement"], report(loss)["kl"]), (1.0, 0.0))


def main() -> None:
    """All checks; an error names the one that fails."""
    check_grouped()
    config, model, live = tiny()
    with torch.no_grad():
        check_forward(config, model, live)
        check_decode(live)
        check_verify(live)
        check_calibration(live)
        check_measures(live)


if __name__ == "__main__":
    main()
