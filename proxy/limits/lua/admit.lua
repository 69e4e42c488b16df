-- Admit one request: charge every limit that it touches and the quotas of one account, or nothing; or give it a ticket. Twin of
-- admission.admit.
--
-- KEYS: the domain's state, a key per limit, then, where accounts are needed, the key of their pool, and for each account its own
--       key and a key per quota. Beside a limit's key: its queue (:q) and what classes use of it (:x).
-- ARGV: fake time or '', deadline in store time or '', known epoch, request id, tenant, class 0..2, how long it may wait in us, most
--       tickets of its tenant, first asking 1|0, number of limits, then per limit six as limits.lua says, the fifth its cost; then
--       for each account the number of its quotas, and six for each.
-- Reply: {0, now_us, epoch} when the deadline has passed: no effect at all. Else integers {verdict, now_us, epoch, number of the
--        refusing limit (from 0) or -1, wait_us or -1 for never, position, number of the account or -1, then per limit remaining,
--        reset_us, cell, wait_us, then a cell per quota of the account}. Verdicts: 1 granted, 2 refused, 3 waiting, 4 no account.

local GRANTED, REFUSED, WAITING, NO_ACCOUNT = 1, 2, 3, 4

local st = enter(KEYS[1], ARGV[1], tonumber(ARGV[3]))
if ARGV[2] ~= '' and st.now > tonumber(ARGV[2]) then
  leave(st)
  return {0, st.now, st.epoch}
end
local request_id, tenant, priority = ARGV[4], ARGV[5], tonumber(ARGV[6])
local may_wait_us, most_waiters, is_first = tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9] == '1'
local count = tonumber(ARGV[10])
local uses = {}

sweep(st)
if priority > 0 then
  st.lower = st.now
  change(st, 'x', st.now)
end

-- Read a limit and see whether its cost fits, beside the headroom that the class leaves unless it is owed something.
local function claim(first, key)
  local l = limit_read(st, first, key)
  l.use, l.wait, l.ahead = use_read(uses, l, st, priority), 0, 0
  if l.number > l.capacity then
    l.wait = -1
  elseif l.number > 0 then
    local room = headroom(l.use, l, priority, st.now)
    l.wait = limit_wait(l, st, l.number + room)
    if l.wait ~= 0 and room > 0 and l.use and has_credit(l, priority) and limit_wait(l, st, l.number) == 0 then
      l.is_by_credit, l.wait = true, 0
    end
  end
  return l
end

local function is_refused(l) return not l.is_shadow and (l.wait ~= 0 or l.ahead > 0) end

local limits, evaluated = {}, {}
for i = 1, count do
  limits[i] = claim(11 + (i - 1) * DESCRIBED, KEYS[i + 1])
  evaluated[i] = limits[i]
  if is_first and limits[i].use then use_ask(limits[i], priority) end
end

-- Who goes first? A ticket whose class is owed its cost goes before all others.
local standing = standing_of(st, request_id)
local own = standing and standing.own or place_for(st, tenant, priority, limits)
local place = own
if st.tickets > 0 then
  local is_owed, is_any_refused = standing and priority > 0, false
  for _, l in ipairs(limits) do
    l.ahead = ahead_of(l.key, place)
    if is_refused(l) then
      is_any_refused = true
      is_owed = is_owed and has_credit(l, priority)
    end
  end
  if is_owed and is_any_refused then
    place = st.virtual
    for _, l in ipairs(limits) do l.ahead = ahead_of(l.key, place) end
  end
end

local function hold_up(claims)
  for _, l in ipairs(claims) do
    if l.use and priority > 0 then l.use['t' .. priority] = st.now end
  end
end

local function reply(verdict, refused, wait, position, account)
  local found = {verdict, st.now, st.epoch, refused, wait, position, account}
  for _, l in ipairs(limits) do
    local remaining, reset = limit_level(l, st)
    found[#found + 1] = remaining
    found[#found + 1] = reset
    found[#found + 1] = l.charged or 0
    found[#found + 1] = l.wait
  end
  uses_write(uses)
  leave(st)
  return found
end

for i, l in ipairs(limits) do
  if l.wait < 0 and not l.is_shadow then
    hold_up(evaluated)
    drop(st, request_id)
    return reply(REFUSED, i - 1, -1, 0, -1)
  end
end

-- 0 when the account is usable; else the time from which it may be, or -1 when nobody knows.
local function blocked_until(key)
  local found = redis.call('HMGET', key, 'd', 'c', 'o', 'h', 'tr', 'tu')
  if found[1] == '1' then return -1 end
  local until_us = math.max(tonumber(found[2] or '0'), tonumber(found[3] or '0'))
  if until_us > st.now then return until_us end
  local trial_until = tonumber(found[6] or '0')
  if found[4] == '1' and trial_until > st.now and found[5] ~= request_id then return trial_until end
  return 0, found[4] == '1'
end

-- The first account that is healthy and has quota; none while others wait for quota who go first.
local needs_account = #KEYS > count + 1
local pool_key, account, quotas, is_any_healthy, is_half_open, account_key = KEYS[count + 2], -1, {}, false, false, nil
local pool_wait, pool_ahead = -1, 0
if needs_account then
  local function ready_in(wait) pool_wait = pool_wait < 0 and wait or math.min(pool_wait, wait) end
  if st.tickets > 0 then pool_ahead = ahead_of(pool_key, place) end
  local key_number, first, number = count + 3, 11 + count * DESCRIBED, 0
  while account < 0 and key_number <= #KEYS do
    local key, quota_count = KEYS[key_number], tonumber(ARGV[first])
    local blocked, half_open = blocked_until(key)
    if blocked > 0 then
      ready_in(blocked - st.now)
    elseif blocked == 0 then
      is_any_healthy = true
      local found, longest, is_never, is_any_refused = {}, 0, false, false
      for i = 1, quota_count do
        local l = claim(first + 1 + (i - 1) * DESCRIBED, KEYS[key_number + i])
        found[i] = l
        evaluated[#evaluated + 1] = l
        if is_refused(l) then
          is_any_refused, is_never = true, is_never or l.wait < 0
          longest = math.max(longest, l.wait)
        end
      end
      if not is_any_refused and pool_ahead == 0 then
        account, quotas, is_half_open, account_key = number, found, half_open, key
      elseif not is_never then
        ready_in(longest)
      end
    end
    key_number, first, number = key_number + 1 + quota_count, first + 1 + quota_count * DESCRIBED, number + 1
  end
  if account < 0 and not is_any_healthy then
    hold_up(evaluated)
    drop(st, request_id)
    return reply(NO_ACCOUNT, -1, pool_wait, 0, -1)
  end
end

-- What is in the way: the limit that takes longest, and how long it takes at least (leases only guess).
local refused, longest, known, position, keys = -1, 0, 0, 0, {}
for i, l in ipairs(limits) do
  if is_refused(l) then
    if refused < 0 or l.wait > longest then refused, longest = i - 1, l.wait end
    if not l.is_leases then known = math.max(known, l.wait) end
    position = math.max(position, l.ahead)
    keys[#keys + 1] = l.key
  end
end
if needs_account and account < 0 then
  if refused < 0 or pool_wait < 0 or pool_wait > longest then refused, longest = count, pool_wait end
  known = pool_wait < 0 and -1 or math.max(known, pool_wait)
  position = math.max(position, pool_ahead)
  keys[#keys + 1] = pool_key
end

if refused < 0 then
  for _, l in ipairs(limits) do l.charged = limit_charge(l, st, l.number, request_id) end
  for _, l in ipairs(quotas) do l.charged = limit_charge(l, st, l.number, request_id) end
  if is_half_open then redis.call('HSET', account_key, 'tr', request_id, 'tu', integer(st.now + TRIAL_US)) end
  if st.tickets > 0 then served(st, tenant, own % CLASS_STEP) end
  drop(st, request_id)
  local is_charged = {}
  for _, l in ipairs(quotas) do
    is_charged[l] = true
    if l.use then use_ask(l, priority) end
  end
  local passed_over = {}
  for i, l in ipairs(evaluated) do
    if i > count and not is_charged[l] then passed_over[#passed_over + 1] = l end
  end
  for _, l in ipairs(limits) do if l.use then use_grant(l, st, priority) end end
  for _, l in ipairs(quotas) do if l.use then use_grant(l, st, priority) end end
  hold_up(passed_over)
  local found = reply(GRANTED, -1, 0, 0, account)
  for _, l in ipairs(quotas) do found[#found + 1] = l.charged end
  return found
end

hold_up(evaluated)
local may_wait = may_wait_us > 0 and longest >= 0 and known <= may_wait_us
if may_wait and not standing and waiters(st, tenant) >= most_waiters then may_wait = false end
if may_wait then
  enqueue(st, request_id, tenant, standing, own, place, keys)
  return reply(WAITING, refused, longest, position, -1)
end
drop(st, request_id)
if refused == count then return reply(REFUSED, refused, pool_wait, pool_ahead, -1) end
local l = limits[refused + 1]
local wait = l.wait + limit_spread(l, l.number, l.wait, l.ahead)
return reply(REFUSED, refused, wait, l.ahead, -1)
