"""The handoff of KV from a prefill worker to a decode worker.

The worker's host puts its orders into the request (`Request.kv_transfer_params`) and collects the results
after each step (`SchedulerSide.take_reports`); vLLM carries both. A save on the prefill worker:

1. services/engine/requests.py `prepare` puts `params.save_params` into the request.
2. vllm/scheduler_side.py `SchedulerSide.add` takes the `params.SaveWish`.
3. `SchedulerSide.loadable_tokens` keeps the request waiting until staging has room for its KV.
4. `SchedulerSide.build_step` makes a `SaveJob` for each step that completes KV blocks.
5. vllm/worker_side.py `WorkerSide.save` receives the job on each rank, after that step's forward pass.
6. save/saver.py `Saver.save` copies the blocks to staging and asks the transports for offers: a `ShardSave`.
7. `SchedulerSide.update` seals a manifest of all ranks' ShardSaves: a `Begun` after the first step, a `Saved`
   after the last.
8. services/worker/outgoing.py `Outgoing` sends the manifest to the worker that follows; the router gets
   only the message `Saved` (protos/worker.proto), which contains no manifest.

A load on the decode worker; it is ordered before its manifest arrives:

1. services/engine/requests.py `prepare` puts `params.load_params` into the request.
2. `SchedulerSide.add` hands the `params.LoadWish` to vllm/loads.py `Loads`.
3. `SchedulerSide.loadable_tokens` claims the tokens, and `allocated` makes a `LoadJob` with vLLM's blocks.
4. `WorkerSide.begin_step` gives the job to load/loader.py `Loader.reserve`, before the step's forward pass.
5. The manifest arrives. `BatonConnector.begin_now` hands it to the loader at once, on the receiving thread;
   ranks in separate processes get it with the next step. The loader's threads (load/pull.py) check it, choose
   a transport, pull, compare digests, write the cache and release the save.
6. `BatonConnector.complete_load` reports that the request has its first token. Once all KV has also arrived,
   the load ends with a `ShardLoad`.
7. `BatonConnector.promote`, called before each step, lets the request run in that step. Failed loads, and all
   loads of ranks in separate processes, reach vLLM a step later through `WorkerSide.transfer_results`.
8. `Loads.update` merges all ranks' ShardLoads into a `Loaded`.

An encode worker's vllm/ec_connector.py puts an image's embeddings on the shelf (save/shelf.py). The worker
that runs the prompt pulls them (load/embeddings.py) and attaches them to the request; `BatonECConnector`
gives them to vLLM's ranks.

save/staging.py holds saved KV under a lease and save/service.py serves it; docs/reliability.md says what ends
the lease if no release arrives. Imports go one way: vllm -> save, load -> transports -> memory -> the modules
next to this file. Only vllm/ imports vLLM.
"""
