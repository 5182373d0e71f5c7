"""A span for every call that was recorded."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from swarmq.proxy.http.tracing import span_watcher


async def test_every_recorded_call_is_a_span_that_ends_with_its_confirm(stages):
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    async with stages(watchers=[span_watcher(provider)]) as stage:
        stage.engine.say("hello")
        await stage.ask({"role": "user", "content": "hi"})
        await stage.refused({"model": "main", "messages": []})
        [turn] = stage.turns()
    [span] = kept.get_finished_spans()
    assert span.name == "chat main"
    assert span.attributes["gen_ai.response.id"] == turn.call_id
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert [event.name for event in span.events] == ["first token", "sampled"]
    assert span.start_time <= span.events[0].timestamp <= span.events[1].timestamp <= span.end_time
