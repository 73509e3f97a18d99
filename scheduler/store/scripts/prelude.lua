-- Put before each script, after the declarations of keys and constants (lua_header in store/redis.py). Every script
-- gets all keys of the topic.

-- Redis answers a missing value with false.
local function number(text) return tonumber(text or '0') end

-- The server's clock in ms.
local function clock()
  local time = redis.call('TIME')
  return number(time[1]) * 1000 + math.floor(number(time[2]) / 1000)
end

local NOW = clock()

-- Let the keys of an unused topic expire.
local function touch()
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, key == DRAINS and DRAINS_TTL_MS or TOPIC_TTL_MS)
  end
end
