-- Book one placement, or change nothing but what ran out of time and an older attempt at the same request. Sweeps.
-- ARGV: 1 request id, 2 epoch, 3 lease ms, 4 router id, 5 prefill worker id or empty, 6 decode worker id,
--       7 prompt tokens, 8 blocks, 9 most prompt tokens where the prompt runs, 10 most requests on the decode worker,
--       11 most blocks on the decode worker, 12 state of a worker that takes requests
-- Reply: {outcome, detail, expired}; outcome and detail as in baton.scheduler.types.ReserveOutcome

local request, epoch = ARGV[1], number(ARGV[2])
local attempt = {
  epoch = epoch, router = ARGV[4], prefill = ARGV[5], decode = ARGV[6],
  tokens = number(ARGV[7]), blocks = number(ARGV[8]), read = false,
}
local expired = sweep()

local last = last_epoch(request)
if epoch <= last then return {'stale', tostring(last), expired} end
local older = redis.call('HGET', ATTEMPTS, request)
if older then release(request, cjson.decode(older), true) end

local function placeable(worker)
  return alive(worker) and redis.call('HGET', STATES, worker) == ARGV[12] and not drained(worker)
end
if attempt.prefill ~= '' and not placeable(attempt.prefill) then return {'gone', attempt.prefill, expired} end
if not placeable(attempt.decode) then return {'gone', attempt.decode, expired} end

local function booked(key, worker) return number(redis.call('HGET', key, worker)) end
local queued = booked(TOKENS, prompt_worker(attempt))
if queued > 0 and queued + attempt.tokens > number(ARGV[9]) then return {'full', prompt_worker(attempt), expired} end
if booked(REQUESTS, attempt.decode) >= number(ARGV[10])
  or booked(BLOCKS, attempt.decode) + attempt.blocks > number(ARGV[11]) then
  return {'full', attempt.decode, expired}
end

book(request, attempt, number(ARGV[3]))
touch()
return {'booked', '', expired}
