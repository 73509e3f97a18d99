"""Interactive requests overtake a flood of batch work, and no answer changes, with drafts and handoffs."""

from concurrent.futures import ThreadPoolExecutor

from harness.deployment import MODEL_NAME
from harness.scrape import total
from harness.support import CALL_S, eventually

FLOOD, PASSING = 40, 4
LONG, SHORT = 80, 10  # tokens of an answer


def figure(one, name):
    """Return a metric of batch work."""
    return total(one.url, f"baton_router_class_{name}", **{"class": "batch"})


def test_interactive_requests_pass_a_flood_of_batch_work(one_pair):
    client = one_pair.client(max_retries=0)

    def ask(number, tokens, tier):
        prompt = f"Number {number % 5} of the things that are told here is this one:"
        got = client.completions.create(
            model=MODEL_NAME,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            extra_body={"ignore_eos": True, "service_tier": tier},
        )
        return got.choices[0].text

    alone = [ask(number, LONG, "auto") for number in range(5)]
    short = [ask(number, SHORT, "auto") for number in range(PASSING)]
    with ThreadPoolExecutor(FLOOD) as threads:
        flood = [threads.submit(ask, number, LONG, "flex") for number in range(FLOOD)]

        def waits():
            assert not all(one.done() for one in flood), "the flood was over before it was seen to wait"
            return figure(one_pair, "waiting_requests") > 0

        eventually(waits, CALL_S, "batch work waits")
        passed = [ask(number, SHORT, "auto") for number in range(PASSING)]
        left = sum(not one.done() for one in flood)
        answers = [one.result() for one in flood]
    assert passed == short
    assert left >= FLOOD // 4, "none of them waited for the flood to end"
    assert answers == [alone[number % 5] for number in range(FLOOD)]
    assert figure(one_pair, "output_tokens_total") >= FLOOD * LONG
