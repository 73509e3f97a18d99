-- Apply a batch of events, in order.
-- ARGV: 1 lease ms, then four for each event: kind (prefilled, finished, renewed), request id, epoch,
--       the Finished message in base64 or empty
-- Reply: {stale events, indices (from 0) of renewed events whose attempt is gone}

local lease = number(ARGV[1])
local stale, lost = 0, {}

local function find(request, epoch)
  if epoch < number(redis.call('HGET', EPOCHS, request)) then
    stale = stale + 1
    return nil
  end
  local text = redis.call('HGET', ATTEMPTS, request)
  if not text then return nil end
  local attempt = cjson.decode(text)
  if attempt.epoch ~= epoch then return nil end
  return attempt
end

for index = 2, #ARGV, 4 do
  local kind, request = ARGV[index], ARGV[index + 1]
  local attempt = find(request, number(ARGV[index + 2]))
  if kind == 'renewed' then
    if attempt then
      redis.call('ZADD', ATTEMPT_LEASES, NOW + lease, request)
    else
      lost[#lost + 1] = (index - 2) / 4
    end
  elseif attempt and kind == 'prefilled' then
    if not attempt.read then
      release_reading(attempt)
      attempt.read = true
      redis.call('HSET', ATTEMPTS, request, cjson.encode(attempt))
    end
  elseif attempt then
    release(request, attempt)
    redis.call('LPUSH', HANDOFFS, cjson.encode({
      prefill = attempt.prefill, decode = attempt.decode, ended = NOW, finished = ARGV[index + 3],
    }))
    redis.call('LTRIM', HANDOFFS, 0, HANDOFFS_KEPT - 1)
  end
end
touch()
return {stale, lost}
