-- Admit one request: charge every limit it touches, or none. Twin of admission.admit.
--
-- KEYS: the clock, then one key per limit.
-- ARGV: fake time or '', deadline in store time or '', request id, then per limit: kind, capacity, amount, period_us, cost, shadow 1|0.
-- Reply: {0, now_us, -1, 0} when the deadline has passed: no effect at all. Else integers {granted 1|0, now_us, number of the
--        refusing limit (from 0) or -1, wait_us or -1 for never, then per limit remaining, reset_us, cell, wait_us}.

local now = now_us(KEYS[1], ARGV[1])
if ARGV[2] ~= '' and now > tonumber(ARGV[2]) then
  remember_now(KEYS[1], now)
  return {0, now, -1, 0}
end
local limits, refused, longest = {}, -1, 0

for i = 1, #KEYS - 1 do
  local first = 4 + (i - 1) * 6
  local l = read_limit(first, KEYS[i + 1])
  l.cost = tonumber(ARGV[first + 4])
  l.is_shadow = ARGV[first + 5] == '1'
  if l.is_bucket then
    l.level = bucket_level(l, now)
    l.wait = bucket_wait(l, l.level, l.cost)
  elseif l.is_leases then
    l.cell = now
    local held = leases_held(l, now)
    l.wait = l.cost > l.capacity and -1 or leases_wait(l, held, l.cost)
  else
    l.cell = cell_at(l, now)
    l.total, l.head, l.gone = window_total(l, l.cell)
    l.wait = l.cost > l.capacity and -1 or window_wait(l, l.total, l.head, l.cell, l.cost, now)
    if type(l.wait) == 'table' then return l.wait end
  end
  if l.cost > l.capacity then l.wait = -1 end
  if l.cost == 0 then l.wait = 0 end -- what costs nothing fits, even where there is debt
  limits[i] = l
end

for i, l in ipairs(limits) do
  if not l.is_shadow then
    if l.wait < 0 then
      refused, longest = i - 1, -1
      break
    elseif l.wait > longest then
      refused, longest = i - 1, l.wait
    end
  end
end

remember_now(KEYS[1], now)
local granted = refused < 0
local reply = {granted and 1 or 0, now, refused, longest}
for _, l in ipairs(limits) do
  if granted and l.is_bucket then
    bucket_write(l, l.level - l.cost, now)
  elseif granted and l.is_leases then
    lease_hold(l, ARGV[3], now)
  elseif granted then
    window_add(l, l.total, l.gone, l.cell, l.cost)
  end
  local remaining, reset = level_of(l, now)
  reply[#reply + 1] = remaining
  reply[#reply + 1] = reset
  reply[#reply + 1] = l.cell or 0
  reply[#reply + 1] = l.wait
end
return reply
