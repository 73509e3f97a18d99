-- Make one scheduler the decider for a while, or for longer. A new one's fence is above all before, also above those
-- of before the server lost what it held: it is not below the clock.
-- ARGV: 1 who, 2 for so many ms
-- Reply: its fence; 0 while another one decides

local who = redis.call('HGET', DECIDER, 'who')
local fence = number(redis.call('HGET', DECIDER, 'fence'))
local alive = number(redis.call('HGET', DECIDER, 'until')) > NOW
if alive and who ~= ARGV[1] then return '0' end
if not alive then fence = math.max(fence + 1, NOW) end
local text = string.format('%d', fence)
redis.call('HSET', DECIDER, 'who', ARGV[1], 'fence', text, 'until', NOW + number(ARGV[2]))
touch()
return text
