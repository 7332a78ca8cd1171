"""The engine with voices: that they are heard, that their prefix is computed once."""

import pytest

from slackwater_inference.core import BadRequest, Reference, Speech, Voice
from slackwater_inference.testing.engine import (
    TEXT,
    VOICE,
    codes_of,
    engine,
    is_empty,
    listen,
    metric,
    num_frames,
    say,
    seeded,
    until,
)

pytestmark = pytest.mark.usefixtures("one_thread")


async def test_a_voice_is_heard_and_its_prefix_is_computed_once():
    with engine(prefill_piece=16) as built:
        speech = seeded(1, voice=VOICE)
        without = await codes_of(built, [TEXT], seeded(1))
        first = await codes_of(built, [TEXT], speech)
        spared = metric(built, "tts_prefix_hit_tokens_total")
        again = await codes_of(built, [TEXT], speech)
        other_tenant = await codes_of(built, [TEXT], seeded(1, voice=VOICE, tenant="t"))

        assert first == again == other_tenant
        assert first != without
        # All of the prompt but its last piece, for the same tenant only.
        num_prompt = len(built._jobs._prompts.prompt(TEXT, VOICE))
        assert metric(built, "tts_prefix_hit_tokens_total") - spared == (num_prompt - 1) // 16 * 16


async def test_a_held_prefix_is_computed_before_the_text_comes_and_kept_until_the_stream_closes():
    with engine(prefill_piece=16, max_prefill_tokens=256) as built:
        stream = built.open(Speech(voice=VOICE), hold_prefix=True)
        await until(lambda: metric(built, "tts_step_seconds_count", phase="prefill", batch_bucket="16") == 1)
        held = built.status().kv_used_ratio

        stream.say(TEXT)
        stream.end()
        heard = await listen(stream)

        assert held > 0
        assert built.status().running == 0
        num_prefix = len(built._jobs._prompts.prefix(VOICE))
        assert metric(built, "tts_prefix_hit_tokens_total") == num_prefix // 16 * 16
        assert num_frames(heard) == 38
        await until(lambda: is_empty(built))


async def test_refuses_a_voice_that_the_model_cannot_read():
    foreign = Voice("v2", (Reference("words", ((1, 2),)),))
    long = Voice("v3", (Reference("words", ((1, 2, 3),) * 600),))
    with engine() as built:
        for voice, complaint in ((foreign, "cannot read this voice: a frame must be 3 codes"), (long, "at most 512")):
            with pytest.raises(BadRequest, match=complaint):
                built.open(Speech(voice=voice), hold_prefix=True)
            with pytest.raises(BadRequest, match=complaint):
                say(built, TEXT, speech=Speech(voice=voice)).close()
        for job in built._jobs.all():
            job.stream.close()
        assert is_empty(built)
