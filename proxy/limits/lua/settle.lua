-- Apply a worker's settle once, however often it is sent; it never refuses and may leave debt. Twin of admission.settle.
--
-- KEYS: the domain's state, the worker's last applied number, then one key per correction.
-- ARGV: fake time or '', known epoch, sequence number, then per correction six as limits.lua says, the fifth the delta (of a
--       lease: below 0 ends it, 0 renews it), charged cell (of a lease: time of its grant), request id.
-- Reply: {the last number applied, now_us}.

local st = enter(KEYS[1], ARGV[1], tonumber(ARGV[2]))
local sequence = tonumber(ARGV[3])
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
if sequence <= last then
  leave(st)
  return {last, st.now}
end
-- First, since a script that fails half-way keeps what it has written: what was applied must not be applied again.
redis.call('SET', KEYS[2], integer(sequence), 'PX', 86400000)

for i = 1, #KEYS - 2 do
  local first = 4 + (i - 1) * (DESCRIBED + 2)
  local l = limit_read(st, first, KEYS[i + 2])
  local charged_cell, request_id = tonumber(ARGV[first + DESCRIBED]), ARGV[first + DESCRIBED + 1]
  if l.is_bucket then
    bucket_write(l, st, math.min(l.capacity, l.level - l.number))
  elseif l.is_leases and l.number < 0 then
    lease_give_back(l, st, request_id, charged_cell)
  elseif l.is_leases then
    lease_take(l, st, request_id)
  elseif l.number >= 0 then
    window_add(l, l.number)
  else
    window_refund(l, charged_cell, -l.number)
  end
end

if st.tickets > 0 then
  for i = 1, #KEYS - 2 do
    if tonumber(ARGV[4 + (i - 1) * (DESCRIBED + 2) + 4]) < 0 then wake(st, KEYS[i + 2]) end
  end
end
leave(st)
return {sequence, st.now}
