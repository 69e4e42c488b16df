-- Admit one request: charge every limit it touches, or none. Twin of admission.admit.
--
-- KEYS: the clock, then one key per limit.
-- ARGV: fake time or '', deadline in store time or '', then per limit: kind, capacity, amount, period_us, cost.
-- Reply: {0, now_us, -1, 0} when the deadline has passed: no effect at all. Else integers {granted 1|0, now_us, number of the refusing limit (from 0) or -1, wait_us or -1 for never,
--        then per limit remaining, reset_us, cell}.

local now = now_us(KEYS[1], ARGV[1])
if ARGV[2] ~= '' and now > tonumber(ARGV[2]) then
  remember_now(KEYS[1], now)
  return {0, now, -1, 0}
end
local limits, refused, longest = {}, -1, 0

for i = 1, #KEYS - 1 do
  local first = 3 + (i - 1) * 5
  local l = read_limit(first, KEYS[i + 1])
  l.cost = tonumber(ARGV[first + 4])
  limits[i] = l
end

for i, l in ipairs(limits) do
  local wait
  if l.cost > l.capacity then
    wait = -1
  elseif l.is_bucket then
    l.level = bucket_level(l, now)
    wait = bucket_wait(l, l.level, l.cost)
  else
    l.cell = cell_at(l, now)
    l.total, l.head, l.gone = window_total(l, l.cell)
    wait = window_wait(l, l.total, l.head, l.cell, l.cost, now)
    if type(wait) == 'table' then return wait end
  end
  if l.cost == 0 then wait = 0 end -- what costs nothing fits, even where there is debt
  if wait < 0 then
    refused, longest = i - 1, -1
    break
  elseif wait > longest then
    refused, longest = i - 1, wait
  end
end

remember_now(KEYS[1], now)
local granted = refused < 0
local reply = {granted and 1 or 0, now, refused, longest}
for _, l in ipairs(limits) do
  if granted and l.is_bucket then
    bucket_write(l, l.level - l.cost, now)
  elseif granted then
    window_add(l, l.total, l.gone, l.cell, l.cost)
  end
  local remaining, reset = level_of(l, now)
  reply[#reply + 1] = remaining
  reply[#reply + 1] = reset
  reply[#reply + 1] = l.cell or 0
end
return reply
