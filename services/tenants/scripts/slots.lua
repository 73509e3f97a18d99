-- Report a router's running requests of an owner, and limit the sum over all live routers.
-- KEYS[1]  HASH router id -> "COUNT UNTIL NUMBER", UNTIL in ms of the server's time
-- ARGV     router id; its count; the message's number, which grows; the limit of the sum, or -1 to set the
--          count unconditionally; ms after which the count expires
-- Returns 1 if the count was set or a later one is there, 0 if the sum would exceed the limit.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local router, count, number = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local most, lease = tonumber(ARGV[4]), tonumber(ARGV[5])

local function read(entry)
  local of, till, at = entry:match('^(%d+) (%d+) (%d+)$')
  return tonumber(of), tonumber(till), tonumber(at)
end

-- Messages use several connections: one that was overtaken must not restore an older count.
local late = false
local mine = redis.call('HGET', KEYS[1], router)
if mine then
  local of, till, at = read(mine)
  if till >= now and at > number then
    late, count = true, math.max(count, of)
  end
end
if most >= 0 then
  local held = redis.call('HGETALL', KEYS[1])
  local all = count
  for at = 1, #held, 2 do
    local of, till = read(held[at + 1])
    if till < now then
      redis.call('HDEL', KEYS[1], held[at])
    elseif held[at] ~= router then
      all = all + of
    end
  end
  if all > most then
    return 0
  end
end
if not late then
  -- A count of 0 is kept for its lease: without its number, a late message would restore an older count.
  redis.call('HSET', KEYS[1], router, string.format('%d %d %.0f', count, now + lease, number))
  redis.call('PEXPIRE', KEYS[1], lease)
end
return 1
