import pytest

from baton.protos import scheduler_pb2 as pb
from baton.services.errors import ServiceError
from baton.services.ray import orders
from baton.services.ray.config import read
from baton.services.ray.desk import Remote
from baton.services.ray.orders import OrderedWorkers, Room
from harness.deployment import MODEL

CPU = {"CPU": 1.0}


def limited(least, most):
    return {"deployment_config": {"autoscaling_config": {"min_replicas": least, "max_replicas": most}}}


def made(prefill=None, least=1, decode=2, encode=None):
    limits = limited(least, 2)
    tree = {
        "engine": {"model": str(MODEL)},
        "autoscale": {"mode": "on"},
        "prefill_config": {**limits, **(prefill or {})},
        "decode_config": limited(least, decode),
        **({"encode_config": encode} if encode else {}),
    }
    return OrderedWorkers(read(tree))


def places(one):
    return dict(one._places)


def test_places_of_like_sides_take_either_role():
    one = made()
    assert one.roles == {"prefill-0": "prefill", "decode-0": "decode"}
    assert places(one) == dict.fromkeys(("prefill-0", "decode-0", "worker-2", "worker-3"), "")
    assert made(least=2).numbers == {"prefill": 2, "decode": 2, "encode": 0}


@pytest.mark.parametrize(
    "prefill",
    [
        {"placement_group_config": {"bundles": [{"CPU": 2}]}},
        {"label_selector": {"zone": "a"}},
        {"runtime_env": {"env_vars": {"A": "b"}}},
        {"engine_kwargs": {"max_num_seqs": 3}},
        {"accelerator_type": "H100"},
    ],
    ids=lambda one: next(iter(one)),
)
def test_places_of_sides_that_differ_belong_to_one(prefill):
    own = places(made(prefill))
    assert own == {f"{role}-{number}": role for role in ("prefill", "decode") for number in (0, 1)}


class Schedulers:
    """Schedulers that decide one after another: `reply` is the answer to the next call.

    tests/e2e/test_ray_autoscale.py has real ones.
    """

    def __init__(self):
        self.reply = pb.OrdersReply()

    async def orders(self, fleet_id, places):
        assert fleet_id
        assert places
        return self.reply


async def test_late_orders_and_unknown_places_are_ignored(monkeypatch):
    monkeypatch.setattr(orders, "ORDERS_S", 0.0)
    one, schedulers = made(), Schedulers()

    async def told(fence, **orders):
        named = [pb.Order(name=name.replace("_", "-"), role=role) for name, role in orders.items()]
        schedulers.reply = pb.OrdersReply(fence=fence, orders=named)
        await one.ask(schedulers)
        return one.roles

    first = {"prefill-0": "prefill", "decode-0": "decode"}
    assert await told(0) == first
    more = {"prefill_0": pb.ROLE_PREFILL, "decode_0": pb.ROLE_DECODE, "worker_2": pb.ROLE_DECODE}
    assert await told(6, **more) == first | {"worker-2": "decode"}
    assert one.numbers == {"prefill": 1, "decode": 2, "encode": 0}
    assert await told(7, prefill_0=pb.ROLE_DECODE, other=pb.ROLE_DECODE) == {"prefill-0": "decode"}
    assert await told(6) == {"prefill-0": "decode"}
    assert await told(0) == {"prefill-0": "decode"}
    assert await told(8) == {}


async def test_encode_workers_get_no_orders(monkeypatch):
    monkeypatch.setattr(orders, "ORDERS_S", 0.0)
    one = made(encode={"deployment_config": {"num_replicas": 2}})
    schedulers = Schedulers()
    assert list(places(one)) == ["prefill-0", "decode-0", "worker-2", "worker-3"]
    encoders = {"encode-0": "encode", "encode-1": "encode"}
    assert one.roles == {"prefill-0": "prefill", "decode-0": "decode"} | encoders
    schedulers.reply = pb.OrdersReply(fence=1, orders=[pb.Order(name="decode-0", role=pb.ROLE_DECODE)])
    await one.ask(schedulers)
    assert one.roles == {"decode-0": "decode"} | encoders
    assert one.numbers == {"prefill": 0, "decode": 1, "encode": 2}


async def test_encode_workers_with_limits_get_orders(monkeypatch):
    monkeypatch.setattr(orders, "ORDERS_S", 0.0)
    one, schedulers = made(decode=1, encode=limited(0, 2)), Schedulers()
    own = {"encode-0": "encode", "encode-1": "encode"}
    assert places(one) == {"prefill-0": "", "decode-0": "", "worker-2": ""} | own
    assert one.roles == {"prefill-0": "prefill", "decode-0": "decode"}
    schedulers.reply = pb.OrdersReply(fence=1, orders=[pb.Order(name="encode-1", role=pb.ROLE_ENCODE)])
    await one.ask(schedulers)
    assert one.numbers == {"prefill": 0, "decode": 0, "encode": 1}


async def test_orders_are_asked_for_about_once_a_second():
    one, schedulers = made(), Schedulers()
    schedulers.reply = pb.OrdersReply(fence=1)
    await one.ask(schedulers)
    schedulers.reply = pb.OrdersReply(fence=1, orders=[pb.Order(name="decode-0", role=pb.ROLE_DECODE)])
    await one.ask(schedulers)
    assert one.roles == {}


def test_ray_is_asked_for_what_is_wanted_when_it_changed(monkeypatch):
    calls = []
    now = 100.0
    monkeypatch.setattr(orders.time, "monotonic", lambda: now)
    room = Room(lambda bundles, labels: calls.append((bundles, labels)))
    room.want([(CPU, {}), ({"GPU": 1.0}, {"zone": "a"})])
    assert calls == [([CPU, {"GPU": 1.0}], [{}, {"zone": "a"}])]
    now += 60
    room.want([({"GPU": 1.0}, {"zone": "a"}), (CPU, {})])  # the same
    assert len(calls) == 1
    room.want([(CPU, {})])
    assert calls[1:] == [([CPU], [{}])]
    now += orders.ROOM_S / 2
    room.want([(CPU, {}), (CPU, {})])  # before ROOM_S
    assert len(calls) == 2
    now += orders.ROOM_S
    room.want([(CPU, {}), (CPU, {})])
    assert calls[2:] == [([CPU, CPU], [{}, {}])]
    room.leave()
    room.leave()
    assert calls[3:] == [([], [])]


class Deciding(Remote):
    def __init__(self, mode):
        super().__init__(None, "")
        self._mode = mode

    def status(self):
        return {"autoscale": self._mode, "bounds": {"prefill": [1, 2], "decode": [1, 2]}}


def test_numbers_are_not_set_by_hand_where_the_scheduler_decides():
    why = r"autoscale\.mode is on.* start with autoscale\.mode off or advise"
    with pytest.raises(ServiceError, match=why):
        Deciding("on").scale(decode=2)
    with pytest.raises(ServiceError, match=r"decode=3 is not allowed: decode_config allows from 1 to 2"):
        Deciding("advise").scale(decode=3)
