-- Say how many requests of an owner a router has under way, and count those of all routers that live.
-- KEYS[1]  HASH router id -> "COUNT UNTIL NUMBER", UNTIL in ms of the server's time
-- ARGV     router id; its count; the number of this saying, which grows with each; the most of all routers
--          together, or -1 to set the count whatever it is; ms until which the count is believed
-- Returns 1 where the count was set or a later one stands, 0 where all together would be too many.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local router, count, number = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local most, lease = tonumber(ARGV[4]), tonumber(ARGV[5])

local function read(entry)
  local of, till, at = entry:match('^(%d+) (%d+) (%d+)$')
  return tonumber(of), tonumber(till), tonumber(at)
end

-- Sayings go over several connections: one that is overtaken must not bring an older count back.
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
  -- A count of 0 stays for its lease: without its number a saying on its way would bring its count back.
  redis.call('HSET', KEYS[1], router, string.format('%d %d %.0f', count, now + lease, number))
  redis.call('PEXPIRE', KEYS[1], lease)
end
return 1
