-- Where limits stand, changing nothing. Twin of admission.peek.
--
-- KEYS: the clock, then one key per limit.
-- ARGV: fake time or '', then per limit: kind, capacity, amount, period_us.
-- Reply: integers, per limit remaining and reset_us.

local now = now_us(KEYS[1], ARGV[1])
local reply = {}
for i = 1, #KEYS - 1 do
  local remaining, reset = level_of(read_limit(2 + (i - 1) * 4, KEYS[i + 1]), now)
  reply[#reply + 1] = remaining
  reply[#reply + 1] = reset
end
return reply
