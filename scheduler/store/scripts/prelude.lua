-- Shared by all scripts, and put before each of them behind the header that names KEYS and constants
-- (baton.scheduler.keys.lua_header). Every script gets all keys of the topic; each documents its ARGV and its reply.

-- Redis answers a missing value with false.
local function number(text) return tonumber(text or '0') end

-- Milliseconds of this server's clock.
local function clock()
  local time = redis.call('TIME')
  return number(time[1]) * 1000 + math.floor(number(time[2]) / 1000)
end

local NOW = clock()

-- A topic in which nothing happens any more vanishes by itself.
local function touch()
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, key == DRAINS and DRAINS_TTL_MS or TOPIC_TTL_MS)
  end
end
