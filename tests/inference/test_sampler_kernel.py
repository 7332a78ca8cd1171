"""The kernels' draw and the engine's own sampler: the same tokens for the same counted noise."""

import pytest
import torch

from slackwater_inference import sampler
from slackwater_kernels import reference
from slackwater_kernels.draws import Draws, Repeats
from slackwater_kernels.sampling import draw

ROWS, NUM_SEMANTIC, NUM_CODES, NUM_CODEBOOKS = 256, 513, 100, 4
RAS_TOP_P = float(torch.tensor(sampler.RAS_TOP_P, dtype=torch.bfloat16))


class Batch:
    """Rows with settings of their own, windows that hold likely tokens, and logits for a frame of each."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        r = torch.arange(ROWS)
        self.seeds = torch.randint(0, 2**62, (ROWS,), generator=generator)
        self.steps = torch.randint(0, 3000, (ROWS,), generator=generator)
        self.temperature = torch.tensor([0.0, 0.3, 0.7, 1.0])[r % 4]
        self.top_p = torch.tensor([0.69921875, 1.0, 0.5])[r % 3]
        self.top_k = torch.tensor([30, 5, 1, 30, 12])[r % 5]
        self.semantic = torch.randn(ROWS, NUM_SEMANTIC + 1, generator=generator) * 3
        self.codes = torch.randn(NUM_CODEBOOKS, ROWS, NUM_CODES, generator=generator) * 3
        self.ids = torch.cat((torch.arange(1000, 1000 + NUM_SEMANTIC), torch.tensor([7])))
        self.window = torch.zeros(ROWS, sampler.WINDOW_FRAMES, 5, dtype=torch.int32)
        self.window[:, :3, 0] = self.ids[self.semantic.topk(3).indices].int()
        self.is_first = r % 8 == 7

    def by_engine(self):
        """As the model runner draws a frame: [NUM_CODEBOOKS + 1, ROWS], indices."""
        noise = sampler.noise(self.seeds, self.steps, sampler.codebook_stage(NUM_CODEBOOKS) + 1)
        settings = self.temperature[:, None], self.top_p[:, None], self.top_k[:, None]
        best = sampler.candidates(self.semantic)
        index = sampler.draw(best, *settings, noise[:, sampler.STAGE_NORMAL])
        ras = torch.full((ROWS, 1), sampler.RAS_TEMPERATURE), torch.full((ROWS, 1), RAS_TOP_P), self.top_k[:, None]
        high = sampler.draw(best, *ras, noise[:, sampler.STAGE_HIGH])
        again = sampler.repeats(self.ids[index], self.window, index < NUM_SEMANTIC) & ~self.is_first
        drawn = [torch.where(again, high, index)]
        for codebook in range(1, NUM_CODEBOOKS + 1):
            uniforms = noise[:, sampler.codebook_stage(codebook)]
            drawn.append(sampler.draw(sampler.candidates(self.codes[codebook - 1]), *settings, uniforms))
        return torch.stack(drawn)

    def by_kernels(self, draw, device):
        """The same frame by `draw`, the reference or the kernel."""
        on = {name: value.to(device) for name, value in vars(self).items()}
        draws = Draws(*(on[n] for n in ("seeds", "steps", "temperature", "top_p", "top_k")), sampler.MAX_TOP_K)
        repeats = Repeats(on["window"], on["ids"], NUM_SEMANTIC, on["is_first"], sampler.RAS_TEMPERATURE, RAS_TOP_P)
        drawn = [draw(on["semantic"], draws, sampler.STAGE_NORMAL, repeats)]
        for codebook in range(1, NUM_CODEBOOKS + 1):
            drawn.append(draw(on["codes"][codebook - 1], draws, sampler.codebook_stage(codebook)))
        return torch.stack(drawn)


@pytest.mark.parametrize("seed", range(4))
def test_the_reference_draws_the_engines_frames_token_for_token(seed):
    batch = Batch(seed)

    assert torch.equal(batch.by_kernels(reference.draw, "cpu"), batch.by_engine())


def test_the_second_draw_and_the_first_frame_are_at_stake():
    batch = Batch(0)
    as_is = batch.by_engine()[0]

    batch.window.zero_()
    without_window = batch.by_engine()[0]

    changed = as_is != without_window
    assert 50 < changed.sum() < 200
    assert not changed[batch.is_first].any()


def test_noise_is_the_engines():
    seeds, steps = torch.tensor([5, 2**61 + 3, 0, 2**62 - 1]), torch.tensor([9, 0, 700, 2**20])

    whole = sampler.noise(seeds, steps, 12)

    for stage in (0, 1, 11):
        assert torch.equal(reference.noise(seeds, steps, stage, sampler.MAX_TOP_K), whole[:, stage])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_draws_the_engines_frames_token_for_token(seed):
    batch = Batch(seed)

    assert torch.equal(batch.by_kernels(draw, "cuda").cpu(), batch.by_engine())


@pytest.mark.gpu
def test_the_kernel_replays_from_a_graph_with_new_steps_and_without_synchronising():
    batch = Batch(9)
    on = {name: value.cuda() for name, value in vars(batch).items()}
    draws = Draws(*(on[n] for n in ("seeds", "steps", "temperature", "top_p", "top_k")), sampler.MAX_TOP_K)
    repeats = Repeats(on["window"], on["ids"], NUM_SEMANTIC, on["is_first"], sampler.RAS_TEMPERATURE, RAS_TOP_P)
    draw(on["semantic"], draws, 0, repeats)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw(on["semantic"], draws, 0, repeats)

    for step in range(5):
        batch.steps = torch.full((ROWS,), step)
        on["steps"].copy_(batch.steps)
        captured.fill_(-1)
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(captured.cpu(), batch.by_engine()[0])
