"""Run prompts in an engine that drafts, and count what its scheduler verifies."""

from collections import Counter
from dataclasses import dataclass, field

from baton.services.decode.proposers import registry
from baton.services.speculation import SpeculativeSettings
from harness.engines import Options
from harness.support import eventually

LIMIT = 4  # drafted tokens


@dataclass
class Tally:
    steps: int = 0
    drafted: int = 0  # tokens that were verified
    accepted: int = 0
    passes: int = 0  # passes of the draft model
    widths: set[int] = field(default_factory=set)  # drafts of one request in one step
    lengths: Counter[int] = field(default_factory=Counter)  # steps by the chosen draft length


COUNTS = [Tally()]  # counts of the engine's process


def observe(engine):
    """Count what is verified from now on. Hand drafts to the scheduler after each step, as the host does."""
    scheduler = engine.core.scheduler
    update, step = scheduler.update_from_output, engine.step

    def counted(scheduler_output, model_runner_output):
        tally = COUNTS[0]
        tally.steps += 1
        for request, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            written = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[request]]
            tally.widths.add(len(drafts))
            tally.drafted += len(drafts)
            tally.accepted += len(written) - 1
        return update(scheduler_output, model_runner_output)

    def stepped():
        going = step()
        engine.core.post_step(going)
        return going

    scheduler.update_from_output = counted
    engine.step = stepped


def take_tally(engine):
    """Return the counts since the last call."""
    del engine
    COUNTS.append(Tally())
    return COUNTS.pop(0)


def ask(engine, name, prompts, answer):
    """Add prompts one after the other, while the earlier ones are decoded."""
    for number, prompt in enumerate(prompts):
        engine.add(f"{name}-{number}", prompt, answer)
        for _ in range(2):
            engine.step()


def go_on(engine):
    """Run some steps, few enough for a busy machine. Return False once all is done."""
    return all(engine.step() for _ in range(20))


def tokens_of(engine, names):
    return [engine.answers[name].tokens for name in names]


def answered(engine, name, prompts, answer):
    """Return the answers to the prompts, of `answer` tokens each."""
    engine.call(ask, name, prompts, answer)
    eventually(lambda: not engine.call(go_on), 120, "all is done", every_s=0)
    return engine.call(tokens_of, [f"{name}-{number}" for number in range(len(prompts))])


def speculating(model, /, **spec):
    settings = SpeculativeSettings(**{"num_speculative_tokens": LIMIT, **spec})
    config = registry.method(settings.method).engine_config(settings)
    config["num_speculative_tokens_per_batch_size"] = [(1, 256, settings.limit)]
    engine = {
        "dtype": "float32",
        "enable_prefix_caching": False,
        "speculative_config": config,
        "additional_config": {"baton": {"speculative": settings.model_dump()}},
    }
    return Options(model, "worker", cores="1", engine=engine)


def plain(model):
    """Return the same engine without drafts."""
    return Options(model, "plain", cores="1", engine={"dtype": "float32", "enable_prefix_caching": False})
