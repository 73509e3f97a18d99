-- Return what another store lacks: all workers, and the requests that have changed since. Changes nothing.
-- ARGV: 1 revision that the caller knows, 0 for none, 2 most requests, 3 roster for which it has the identities
-- Reply: {now ms, generation or empty, revision that the caller knows now, 1 if there are more requests,
--         requests (flat, four for each: id, attempt or empty, end of its lease or 0, epoch or empty),
--         roster, identities or empty, states, loads, worker epochs, worker leases, drains}; hashes and leases flat

local last, since, most = number(redis.call('GET', REVISION)), number(ARGV[1]), number(ARGV[2])
if since > last then since = 0 end -- this server has lost a part of what it held
local changes = redis.call('ZRANGEBYSCORE', CHANGES, '(' .. since, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
local requests = {}
for index = 1, #changes, 2 do
  local request, at = changes[index], #requests
  requests[at + 1] = request
  requests[at + 2] = redis.call('HGET', ATTEMPTS, request) or ''
  requests[at + 3] = redis.call('ZSCORE', ATTEMPT_LEASES, request) or '0'
  requests[at + 4] = redis.call('HGET', EPOCHS, request) or ''
end
local more = #changes == 2 * most
local roster = redis.call('GET', ROSTER) or ''
local identities = {}
if roster ~= ARGV[3] then identities = redis.call('HGETALL', IDENTITIES) end
return {
  NOW, redis.call('GET', GENERATION) or '', more and number(changes[#changes]) or last, more and 1 or 0, requests,
  roster, identities, redis.call('HGETALL', STATES), redis.call('HGETALL', LOADS),
  redis.call('HGETALL', WORKER_EPOCHS),
  redis.call('ZRANGEBYSCORE', WORKER_LEASES, '(' .. NOW, '+inf', 'WITHSCORES'),
  redis.call('HGETALL', DRAINS),
}
