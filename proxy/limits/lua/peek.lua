-- Where limits stand, changing nothing. Twin of admission.peek.
--
-- KEYS: the domain's state, then one key per limit.
-- ARGV: fake time or '', then per limit six as limits.lua says, the fifth 0.
-- Reply: integers, per limit remaining and reset_us.

local st = enter(KEYS[1], ARGV[1], 0)
local reply = {}
for i = 1, #KEYS - 1 do
  local remaining, reset = limit_level(limit_read(st, 2 + (i - 1) * DESCRIBED, KEYS[i + 1]), st)
  reply[#reply + 1] = remaining
  reply[#reply + 1] = reset
end
return reply
