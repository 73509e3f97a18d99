-- Say how many requests of an owner a router has under way, and count those of all routers that live.
-- KEYS[1]  HASH router id -> "COUNT UNTIL", UNTIL in ms of the server's time
-- ARGV     router id; its count; the most of all routers together, or -1 to set the count whatever it is;
--          ms until which the count is believed
-- Returns 1 where the count was set, 0 where all together would be too many.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local router, count, most, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
if most >= 0 then
  local held = redis.call('HGETALL', KEYS[1])
  local all = count
  for at = 1, #held, 2 do
    local of, till = held[at + 1]:match('^(%d+) (%d+)$')
    if tonumber(till) < now then
      redis.call('HDEL', KEYS[1], held[at])
    elseif held[at] ~= router then
      all = all + tonumber(of)
    end
  end
  if all > most then
    return 0
  end
end
if count == 0 then
  redis.call('HDEL', KEYS[1], router)
else
  redis.call('HSET', KEYS[1], router, string.format('%d %d', count, now + lease))
  redis.call('PEXPIRE', KEYS[1], lease)
end
return 1
