-- Apply a worker's settle once, however often it is sent; it never refuses and may leave debt. Twin of admission.settle.
--
-- KEYS: the clock, the worker's last applied number, then one key per correction.
-- ARGV: fake time or '', sequence number, then per correction: kind, capacity, amount, period_us, charged cell (of a
--       lease: time of its grant), delta (of a lease: below 0 ends it, 0 renews it), request id.
-- Reply: the last number applied.

local now = now_us(KEYS[1], ARGV[1])
local sequence = tonumber(ARGV[2])
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
remember_now(KEYS[1], now)
if sequence <= last then return last end
-- First, since a script that fails half-way keeps what it has written: what was applied must not be applied again.
redis.call('SET', KEYS[2], integer(sequence), 'PX', 86400000)

for i = 1, #KEYS - 2 do
  local first = 3 + (i - 1) * 7
  local l = read_limit(first, KEYS[i + 2])
  local charged_cell, delta = tonumber(ARGV[first + 4]), tonumber(ARGV[first + 5])
  if l.is_bucket then
    bucket_write(l, math.min(l.capacity, bucket_level(l, now) - delta), now)
  elseif l.is_leases and delta < 0 then
    lease_give_back(l, ARGV[first + 6], charged_cell, now)
  elseif l.is_leases then
    lease_hold(l, ARGV[first + 6], now)
  else
    local cell = cell_at(l, now)
    local total, _, gone = window_total(l, cell)
    if delta >= 0 then
      window_add(l, total, gone, cell, delta)
    else
      window_refund(l, total, gone, cell, charged_cell, -delta)
    end
  end
end

return sequence
