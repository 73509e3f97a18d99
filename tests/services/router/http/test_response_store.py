import openai
import pytest
import pytest_asyncio

from baton.protos.worker_pb2 import PHASE_DECODE
from baton.services.tenants.model import Book, Tenant
from harness.api_site import ApiSite
from harness.fake_worker import MODEL, Fault, until
from harness.scheduling import until as until_async
from harness.support import free_port
from tests.services.router.http.site import api_key

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

MINE, THEIRS, ONE = "c4nary-mine", "c4nary-theirs", "c4nary-one"
STORE = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
ASKED = {"model": MODEL, "input": "Where?", "max_output_tokens": 200}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory):
    keys = {"mine": api_key(MINE, "me"), "theirs": api_key(THEIRS, "them"), "one": api_key(ONE, "one")}
    book = Book(tenants={"one": Tenant(concurrency=1)}, keys=keys)
    async with ApiSite(tmp_path_factory.mktemp("stored"), book=book, environment=STORE) as made:
        made.says("It is Paris.")
        yield made


@pytest.fixture(autouse=True)
def no_faults(site):
    site.worker.faults.clear()


async def over(client, response_id):

    async def ended():
        return (await client.responses.retrieve(response_id)).status not in ("queued", "in_progress")

    await until_async(ended, 15)
    return await client.responses.retrieve(response_id)


async def test_an_answer_belongs_to_its_tenant(site):
    async with site.openai(MINE) as mine, site.openai(THEIRS) as theirs:
        made = await mine.responses.create(**ASKED)
        assert (await mine.responses.retrieve(made.id)).output_text == "It is Paris."
        for call in (
            lambda: theirs.responses.retrieve(made.id),
            lambda: theirs.responses.cancel(made.id),
            lambda: theirs.responses.delete(made.id),
            lambda: theirs.responses.create(**ASKED, previous_response_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call()
        more = await mine.responses.create(**ASKED, previous_response_id=made.id)
        assert more.usage.input_tokens > made.usage.input_tokens  # it includes the earlier turns
        # A client's own id could replace another tenant's.
        named = await theirs.responses.create(**ASKED, extra_body={"request_id": made.id})
        assert named.id != made.id
        kept = await mine.responses.create(**ASKED, store=False)
        with pytest.raises(openai.NotFoundError):
            await mine.responses.retrieve(kept.id)
        await mine.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await mine.responses.retrieve(made.id)


async def test_background_responses_end(site):
    async with site.openai(MINE) as client:
        made = await client.responses.create(**ASKED, background=True)
        assert (await over(client, made.id)).output_text == "It is Paris."
        cut = await client.responses.create(**{**ASKED, "max_output_tokens": 3}, background=True)
        found = await over(client, cut.id)
        assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        site.worker.faults.append(Fault(PHASE_DECODE, silent=True))
        soon = {"X-Request-Timeout": "0.5"}
        late = await client.responses.create(**ASKED, background=True, extra_headers=soon)
        failed = await over(client, late.id)
        assert failed.status == "failed"
        assert "took longer" in failed.error.message


@pytest.mark.parametrize("tokens", [200, 3])
async def test_a_background_stream_can_be_followed(site, tokens):
    async with site.openai(MINE) as client:
        asked = {**ASKED, "max_output_tokens": tokens}
        stream = await client.responses.create(**asked, background=True, stream=True)
        events = [event async for event in stream]
        end = "response.completed" if tokens == 200 else "response.incomplete"
        assert events[-1].type == end
        response_id = events[0].response.id
        again = await client.responses.retrieve(response_id, stream=True, starting_after=3)
        assert [one.sequence_number async for one in again] == [one.sequence_number for one in events[4:]]


async def test_a_background_response_counts_for_its_tenant(site):
    site.worker.faults.append(Fault(PHASE_DECODE, after_tokens=1, silent=True))
    async with site.openai(ONE) as client:
        made = await client.responses.create(**ASKED, background=True)
        with pytest.raises(openai.RateLimitError, match="concurrency"):
            await client.responses.create(**ASKED)
        with pytest.raises(openai.RateLimitError, match="concurrency"):
            await client.responses.create(**ASKED, background=True)
        async with site.http(ONE) as http:  # cancelling would be a request, and refused
            assert (await http.get(f"/v1/responses/{made.id}")).json()["status"] == "in_progress"
            assert (await http.delete(f"/v1/responses/{made.id}")).json()["deleted"]
        await until(lambda: not site.worker.running, "its worker drops it")

        async def free():
            try:
                await client.responses.create(**ASKED)
            except openai.RateLimitError:
                return False
            return True

        await until_async(free, 10)


async def test_a_background_response_is_cancelled(site):
    site.worker.faults.append(Fault(PHASE_DECODE, after_tokens=1, silent=True))
    async with site.openai(MINE) as client:
        made = await client.responses.create(**ASKED, background=True)
        await until(lambda: site.worker.running, "it runs")
        with pytest.raises(openai.BadRequestError, match="is not complete yet"):
            await client.responses.create(**ASKED, previous_response_id=made.id)
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        await until(lambda: not site.worker.running, "its worker drops it")
        assert (await client.responses.retrieve(made.id)).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="only an unfinished background response"):
            await client.responses.cancel(made.id)
    assert "Traceback" not in site.process.text


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, "responses are stored in one router's memory"),
        ({"processes": 2}, "router.processes: value 2 is not allowed"),
    ],
    ids=["a second router", "several processes"],
)
async def test_only_one_process_starts(site, more, why):
    second = site.start_router(free_port(), **more)
    await until(lambda: second.poll() is not None, "it ends", 20)
    assert why in second.text
    async with site.openai(MINE) as client:
        assert (await client.responses.create(**ASKED)).status == "completed"
