-- What all scripts share first: store time, and the memory of one domain. Twin of admission.enter.
--
-- Hash <domain>:state = {t = last store time, e = epoch, r = when an earlier memory was found to be lost, v = virtual time of the
-- queues, n = tickets, x = last call of a class below interactive}. A domain's keys all begin as this one does.

-- GRACE_MS: kept beyond the moment at which the state equals an absent key.
local GRACE_MS, STATE_MS, HOUR_US = 60000, 2592000000, 3600000000

local function integer(x) return string.format('%d', x) end
local function real(x) return string.format('%.17g', x) end

-- Store time never runs backwards. `fake` is empty but in tests; `known` is the epoch that the caller knows of, 0 for none.
local function enter(key, fake, known)
  local time
  if fake ~= '' then
    time = tonumber(fake)
  else
    local parts = redis.call('TIME')
    time = tonumber(parts[1]) * 1000000 + tonumber(parts[2])
  end
  local found = redis.call('HMGET', key, 't', 'e', 'r', 'v', 'n', 'x')
  local last = tonumber(found[1] or '0')
  local st = {
    key = key, prefix = string.sub(key, 1, -6), last = last, now = math.max(time, last),
    epoch = tonumber(found[2] or '0'), lost = tonumber(found[3] or '0'), virtual = tonumber(found[4] or '0'),
    tickets = tonumber(found[5] or '0'), lower = tonumber(found[6] or '0'), changed = {}, woken = {},
  }
  if st.epoch == 0 then
    st.epoch = st.now
    if known ~= 0 then st.lost = st.now end
    st.changed = {'e', integer(st.epoch), 'r', integer(st.lost)}
  elseif known ~= 0 and known ~= st.epoch and st.lost == 0 then
    st.lost = st.epoch
    st.changed = {'r', integer(st.lost)}
  end
  return st
end

local function change(st, field, value)
  st.changed[#st.changed + 1] = field
  st.changed[#st.changed + 1] = integer(value)
end

-- Every script that may write ends with this.
local function leave(st)
  redis.call('HSET', st.key, 't', integer(st.now), unpack(st.changed))
  if math.floor(st.now / HOUR_US) ~= math.floor(st.last / HOUR_US) then redis.call('PEXPIRE', st.key, STATE_MS) end
end
