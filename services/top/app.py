"""The screen of `baton top`, built on textual's App, DataTable, Input, ModalScreen and Static."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.services.errors import ServiceError
from baton.services.overview.commands import Kind, act
from baton.services.overview.workers import GONE, Row, Workers, changes
from baton.services.top import view
from baton.services.top.view import Seen, share

REFRESH_S = 1.0
SHOWN_REQUESTS = 20
KEPT_EVENTS = 200
ID_WIDTH = 27  # all columns then fit into 80 characters
_COLUMNS = ("worker", "side", "state", "run", "wait", "KV", "acc", "tok/s")
_REQUESTS = ("request", "outcome", "in", "out", "prefill", "handoff", "decode", "ago s")
_OTHER = {"prefill": "decode", "decode": "prefill"}


class Question(ModalScreen[bool]):
    """Asks for confirmation: `y` for yes, any other key for no."""

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Static { width: 60; height: auto; border: heavy $warning; padding: 1 2; background: $surface; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(f"{self._text}\n\n[b]y[/b] yes    any other key: no", id="question")

    def on_key(self, event: object) -> None:
        key = getattr(event, "key", "")
        self.dismiss(key == "y")


class Top(App[None]):
    """The deployment, refreshed once a second, one model at a time."""

    TITLE = "baton top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; padding: 0 1; }
    #workers { height: 1fr; }
    #filter { display: none; height: 3; }
    #filter.open { display: block; }
    #below { height: 11; }
    #requests { height: 1fr; }
    #events { height: 4; padding: 0 1; border-top: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("escape", "all", "all", show=False),
        Binding("d", "drain", "drain"),
        Binding("u", "undrain", "undrain"),
        Binding("f", "flip", "flip"),
        Binding("m", "model", "model"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, addresses: Mapping[str, str], refresh_s: float = REFRESH_S) -> None:
        """Show the first model of `addresses`, which has the schedulers' addresses by model."""
        super().__init__()
        self._addresses = addresses
        self._model = next(iter(addresses))
        self._refresh_s = refresh_s
        self._client: SchedulerClient | None = None  # made in the event loop
        self._now: Seen | None = None
        self._before: Seen | None = None
        self._asking = False
        self._problem = ""
        self._sort = next(iter(view.SORTS))
        self._words = ""
        self._rows = Workers()
        self._shown: dict[str, tuple[str, ...]] = {}  # worker id -> its cells, in the table's order
        self._events: deque[str] = deque(maxlen=KEPT_EVENTS)

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield Input(placeholder="words in a worker's id, side or state; then Enter", id="filter")
        yield DataTable(id="workers", cursor_type="row", zebra_stripes=True)
        with Vertical(id="below"):
            yield DataTable(id="requests", cursor_type="none")
            yield Static(id="events", markup=False)
        yield Footer()

    async def on_mount(self) -> None:
        self._client = SchedulerClient(self._addresses[self._model])
        self._table.add_columns(*_COLUMNS)
        self.query_one("#requests", DataTable).add_columns(*_REQUESTS)
        self._table.focus()
        self.set_interval(self._refresh_s, self.look)
        await self.look()

    async def on_unmount(self) -> None:
        if self._client is not None:
            await self._client.close()

    @property
    def _table(self) -> DataTable[str]:
        return self.query_one("#workers", DataTable)

    async def look(self) -> None:
        """Ask the scheduler and show its answer, or else the last one."""
        if self._asking or self._client is None:
            return  # the last call has not returned yet
        self._asking = True
        try:
            description = await self._client.describe()
        except SchedulerError as error:
            self._problem = str(error)
        else:
            self._problem = ""
            self._take(Seen(time.monotonic(), description))
        finally:
            self._asking = False
        if self.is_running:  # otherwise its widgets no longer exist
            self._show()

    def _take(self, seen: Seen) -> None:
        self._before, self._now = self._now, seen
        old = {row.id: row for row in self._rows.rows}
        self._rows.update(seen.description.workers)
        if self._before is not None:
            for _, change in changes(old, {row.id: row for row in self._rows.rows}):
                self._note(change)
            for change in view.changes(self._before.description, seen.description):
                self._note(change)

    def _note(self, event: str) -> None:
        self._events.appendleft(f"{time.strftime('%H:%M:%S')} {event}")

    @property
    def _present(self) -> list[Row]:
        return [row for row in self._rows.rows if row.state != GONE]

    def _show(self) -> None:
        if self._now is None:
            self.query_one("#head", Static).update(self._problem)
            return
        self.query_one("#head", Static).update(self._head(self._now))
        self._fill(view.chosen(self._present, self._words, self._sort))
        self._fill_requests(self._now.description.handoffs[:SHOWN_REQUESTS])
        self.query_one("#events", Static).update("\n".join(list(self._events)[:3]) or "no events yet")

    def _head(self, now: Seen) -> str:
        seen, flow, found = now.description, view.traffic(now, self._before), self._present
        several = len(self._addresses) > 1
        which = f"model {self._model} of {len(self._addresses)} (m: the next), " if several else ""
        lines = [
            f"{which}topic {seen.topic}, store {seen.store}, "
            f"{len(found)} workers, {len(seen.routers)} routers | sort: {self._sort}"
            + (f" | filter: {self._words}" if self._words else ""),
            f"{flow.requests_s:,.1f} requests/s  {flow.tokens_s:,.0f} tok/s  {flow.waiting} wait"
            f"  TTFT {_times(flow.ttft)}  ITL {_times(flow.itl)}",
        ]
        lines += view.sides(found)
        if forming := view.forming(seen.workers):
            lines.append(f"gangs: {forming}")
        if seen.store_problem:
            lines.insert(0, f"THE STORE IS DOWN: {seen.store_problem}")
        if self._problem:
            lines.insert(0, f"NO ANSWER, this is {time.monotonic() - now.at:.0f} s old: {self._problem}")
        return "\n".join(lines)

    def _fill(self, found: Sequence[Row]) -> None:
        table, wanted = self._table, {row.id: _cells(row) for row in found}
        if list(wanted) == list(self._shown):
            columns = list(table.columns)
            for name, cells in wanted.items():
                for column, new, old in zip(columns, cells, self._shown[name], strict=True):
                    if new != old:
                        table.update_cell(name, column, new)
        else:
            at = self._selected()
            top = table.scroll_y
            table.clear()
            for name, cells in wanted.items():
                table.add_row(*cells, key=name)
            if at in wanted:
                table.move_cursor(row=table.get_row_index(at), scroll=False)
            table.scroll_to(y=top, animate=False)
        self._shown = wanted

    def _fill_requests(self, past: Sequence[pb.PastHandoff]) -> None:
        table = self.query_one("#requests", DataTable)
        table.clear()
        for one in past:
            cost = one.cost
            table.add_row(
                _ended(one.attempt.request_id, 18),
                one.outcome,
                str(cost.prompt_tokens),
                str(cost.output_tokens),
                f"{cost.prefill_ms:.0f} ms",
                f"{cost.handoff_ms:.0f} ms",
                f"{cost.decode_ms:.0f} ms",
                f"{one.age_s:.0f}",
            )

    def _selected(self) -> str:
        ids = list(self._shown)
        at = self._table.cursor_row
        return ids[at] if 0 <= at < len(ids) else ""

    def action_sort(self) -> None:
        names = list(view.SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self._show()

    async def action_model(self) -> None:
        if len(self._addresses) == 1 or self._asking or self._client is None:
            return
        names = list(self._addresses)
        self._model = names[(names.index(self._model) + 1) % len(names)]
        client, self._client = self._client, SchedulerClient(self._addresses[self._model])
        self._now = self._before = None
        self._rows = Workers()
        self._problem = f"asking the scheduler of {self._model}"
        await client.close()
        await self.look()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.add_class("open")
        field.focus()

    def action_all(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._close_filter("")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._close_filter(event.value)

    def _close_filter(self, words: str) -> None:
        self._words = words
        self.query_one("#filter", Input).remove_class("open")
        self._table.focus()
        self._show()

    def action_drain(self) -> None:
        self._ask("Drain", "it finishes its requests and exits", "drain")

    def action_undrain(self) -> None:
        self._ask("Undrain", "it takes requests again", "undrain")

    def action_flip(self) -> None:
        row = next((row for row in self._present if row.id == self._selected()), None)
        other = _OTHER.get(row.role, "") if row else ""
        if row is not None and not other:
            why = "it does both" if row.role == "mixed" else "that does not change"
            self.notify(f"{row.id} is {row.role}: {why}", severity="warning")
            return
        self._ask("Flip", f"it becomes a {other} worker", "role", other)

    def _ask(self, what: str, then: str, kind: Kind, role: str = "") -> None:
        name = self._selected()
        if not name:
            self.notify("no worker is selected", severity="warning")
            return

        async def answered(meant: bool | None) -> None:
            if meant:
                await self._do(kind, name, role)

        self.push_screen(Question(f"{what} {name}?\n{then}"), answered)

    async def _do(self, kind: Kind, name: str, role: str) -> None:
        if self._client is None:
            return
        try:
            said = await act(self._client, kind, name, role)
        except (SchedulerError, ServiceError) as error:
            said = str(error)
        self.notify(said, timeout=8)
        self._note(f"asked: {said}")
        await self.look()


def _cells(row: Row) -> tuple[str, ...]:
    tokens_s = row.output_tokens_per_s if row.kept is None else row.prefill_tokens_per_s
    return (
        _ended(row.id, ID_WIDTH),
        row.role,
        row.state if row.silent_s < 10 else f"silent {row.silent_s:.0f}s",
        str(row.running),
        str(row.waiting),
        share(row.kv_usage),
        f"{share(row.acceptance)}{' LOW' if row.alarm else ''}",
        "-" if tokens_s is None else f"{tokens_s:,.0f}",
    )


def _ended(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[1 - width :]}"


def _times(found: tuple[float, float] | None) -> str:
    return "-" if found is None else f"{found[0] * 1e3:,.0f}/{found[1] * 1e3:,.0f} ms"
