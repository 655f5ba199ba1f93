"""The model of links: against what others publish, against reason, and against the page that tells of it."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from dataplane.blocks.layout import KVLayout
from tests.bench import links
from tests.bench.links import (
    LINKS,
    MODELS,
    MOONCAKE_ROWS,
    NVLINK,
    OPT_66B,
    QWEN,
    LinkSpec,
    ModelShape,
    handover,
)

PAGE = Path(__file__).parents[2] / "dataplane" / "SCALING.md"
SLOW = LinkSpec("slow", 0.5, 1.0)
IDS = [row.what + ", " + row.unit for row in links.published()]


@pytest.mark.parametrize("row", list(links.published()), ids=IDS)
def test_a_published_figure_is_met(row: links.Published) -> None:
    assert row.modelled == pytest.approx(row.published, rel=row.tolerance)


def test_the_fit_to_many_times_has_two_numbers_only() -> None:
    """With either of them wrong by a quarter the times would not be met."""
    for wrong in (links.MOONCAKE._replace(efficiency=0.58), links.MOONCAKE._replace(efficiency=0.97)):
        off = [abs(links.whole_ms(QWEN, n + 16, wrong) / ms - 1) for n, _, ms in MOONCAKE_ROWS if n >= 1024]
        assert max(off) > 0.15


@pytest.mark.parametrize("model", [*MODELS, OPT_66B], ids=lambda model: model.name)
def test_a_token_weighs_what_it_weighs_in_an_arena(model: ModelShape) -> None:
    layout = KVLayout(
        weights="w", dtype="bfloat16", num_layers=model.num_layers, num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim, block_size=16,
    )  # fmt: skip
    assert model.token_bytes * 16 == layout.block_bytes


def test_a_prefill_is_the_sum_of_its_chunks() -> None:
    model = MODELS[0]
    whole = model.prefill_flop(0, 1000)
    assert sum(model.prefill_flop(at, at + 100) for at in range(0, 1000, 100)) == pytest.approx(whole)
    assert whole > 2 * model.num_parameters * 1000
    assert model.prefill_flop(900, 1000) > model.prefill_flop(0, 100), "later tokens see more"
    assert handover(model, 1000, NVLINK, chunk_tokens=100).prefill_ms == pytest.approx(whole / links.TFLOPS / 1e9)


@pytest.mark.parametrize("link", [*LINKS, SLOW], ids=lambda link: link.name)
@pytest.mark.parametrize("num_tokens", [1, 511, 513, 4000])
def test_overlapping_hides_something_and_never_more_than_there_is(link: LinkSpec, num_tokens: int) -> None:
    over = handover(QWEN, num_tokens, link)
    num_chunks = -(-num_tokens // links.CHUNK_TOKENS)
    frames_more_ms = QWEN.num_layers * num_chunks * link.frame_us / 1e3
    assert link.fixed_ms < over.exposed_ms <= over.whole_ms + frames_more_ms
    assert over.exposed_ms >= over.whole_ms - over.prefill_ms - 1e-9, "the link is busy as long as it is"


def test_what_a_quick_link_exposes_does_not_grow_with_the_prompt() -> None:
    """As Splitwise reports of its per-layer transfer, whose serialized one grows with the prompt."""
    overs = [handover(QWEN, num_tokens, LINKS[1], chunk_tokens=500) for num_tokens in (500, 2000, 8000, 32_000)]
    assert [over.exposed_ms for over in overs] == pytest.approx([overs[0].exposed_ms] * 4, rel=1e-6)
    assert all(after.whole_ms > 3 * before.whole_ms for before, after in pairwise(overs))
    slow = [handover(QWEN, num_tokens, SLOW).exposed_ms for num_tokens in (1000, 2000)]
    assert slow[1] > 1.8 * slow[0], "a link slower than the prefill falls behind"


def test_from_the_rate_at_which_a_link_keeps_up_the_last_layer_alone_is_exposed() -> None:
    for model in MODELS:
        rate = links.hidden_from_gb_per_s(model)
        quick, slow = (LinkSpec("", share * rate, 1.0, fixed_ms=0.0, frame_us=0.0) for share in (1.05, 0.5))
        last_layer_ms = 488 * model.token_bytes / model.num_layers / quick.bytes_per_ms
        assert handover(model, 1000, quick).exposed_ms == pytest.approx(last_layer_ms)
        assert handover(model, 1000, slow).exposed_ms > 0.4 * handover(model, 1000, slow).prefill_ms


def test_the_command_prints_the_table_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    links.main("1000,4000,32000", links.TFLOPS, links.CHUNK_TOKENS, as_json=False, as_markdown=True)
    assert capsys.readouterr().out in PAGE.read_text()


def test_the_command_prints_json(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    links.main("1000", 200.0, 100, as_json=True, as_markdown=False)
    rows = json.loads(capsysbinary.readouterr().out)["rows"]
    assert len(rows) == len(MODELS) * len(LINKS)
    assert {row["num_tokens"] for row in rows} == {1000}
    doubled = handover(MODELS[0], 1000, LINKS[0], tflops=400.0, chunk_tokens=100).prefill_ms * 2
    assert rows[0]["prefill_ms"] == pytest.approx(doubled)


def test_every_source_that_the_page_cites_is_listed() -> None:
    body, _, sources = PAGE.read_text().partition("## Sources")
    listed = {line.partition(".")[0] for line in sources.splitlines() if line[:1].isdigit()}
    cited = {part.partition("]")[0] for part in body.split("[")[1:] if part.partition("]")[0].isdigit()}
    assert cited == listed
