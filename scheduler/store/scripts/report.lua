-- Apply a batch of events, in order.
-- ARGV: 1 lease ms, then four for each event: kind (placed, prefilled, finished, renewed, shared), request id,
--       epoch, what belongs to it: of placed the attempt as JSON, of finished the message in base64, of shared
--       the blocks that are left
-- Reply: {stale events, indices (from 0) of renewed events whose attempt is not booked, indices of placed and
--         renewed events that are fenced}

local lease = number(ARGV[1])
local stale, lost, fenced = 0, {}, {}

local function find(request, epoch)
  local text = redis.call('HGET', ATTEMPTS, request)
  if not text then return nil end
  local attempt = cjson.decode(text)
  if attempt.epoch ~= epoch then return nil end
  return attempt
end

for index = 2, #ARGV, 4 do
  local kind, request = ARGV[index], ARGV[index + 1]
  local epoch, place = number(ARGV[index + 2]), (index - 2) / 4
  local last, over = last_epoch(request)
  if epoch < last then stale = stale + 1 end
  local attempt = find(request, epoch)
  if kind == 'placed' then
    if not adopt(request, cjson.decode(ARGV[index + 3]), lease) then fenced[#fenced + 1] = place end
  elseif kind == 'renewed' then
    if attempt then
      redis.call('ZADD', ATTEMPT_LEASES, NOW + lease, request)
      changed(request)
    elseif epoch < last or (epoch == last and over) then
      fenced[#fenced + 1] = place
    else
      lost[#lost + 1] = place
    end
  elseif attempt and kind == 'prefilled' then
    if not attempt.read then
      release_prompt(attempt)
      attempt.read = true
      redis.call('HSET', ATTEMPTS, request, cjson.encode(attempt))
      changed(request)
    end
  elseif attempt and kind == 'shared' then
    if share(attempt, number(ARGV[index + 3])) then
      redis.call('HSET', ATTEMPTS, request, cjson.encode(attempt))
      changed(request)
    end
  elseif kind == 'finished' and not attempt then
    conclude(request, epoch, true) -- it may be booked elsewhere, and be written back from there
  elseif attempt then
    release(request, attempt, true)
    redis.call('LPUSH', HANDOFFS, cjson.encode({
      prefill = attempt.prefill, decode = attempt.decode, ended = NOW, finished = ARGV[index + 3],
    }))
    redis.call('LTRIM', HANDOFFS, 0, HANDOFFS_KEPT - 1)
  end
end
touch()
return {stale, lost, fenced}
