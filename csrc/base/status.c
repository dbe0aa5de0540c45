// status.c: error values. The message is on the heap, so that an error can list a thousand names;
// if it cannot be allocated, its beginning is kept in `fixed`.
#include "base/status.h"

#include <stdio.h>
#include <string.h>

#include "base/memory.h"

enum { MESSAGE_MAX = 64 * 1024 };
static const char ellipsis[] = "…";

// The last character boundary at or before `length`, so that a cut message stays valid UTF-8.
static size_t utf8_cut(const char *text, size_t length) {
  while (length > 0 && ((unsigned char)text[length] & 0xC0) == 0x80) length--;
  return length;
}

// Formats to a new string that begins with the first `used` bytes of `old`. The string is new
// because the arguments may point into the old message. NULL when it cannot be allocated.
static char *extended(const char *old, size_t used, const char *format, va_list args) {
  va_list again;
  va_copy(again, args);
  const int wanted = vsnprintf(NULL, 0, format, again);
  va_end(again);
  const size_t room = MESSAGE_MAX - used;
  const int cut = wanted > 0 && (size_t)wanted > room;
  const size_t length = wanted < 0 ? 0 : cut ? room : (size_t)wanted;
  char *text = rm_alloc(used + length + sizeof ellipsis, 1);
  if (!text) return NULL;
  if (used > 0) memcpy(text, old, used);
  vsnprintf(text + used, length + 1, format, args);
  if (cut) memcpy(text + utf8_cut(text, used + length - 1), ellipsis, sizeof ellipsis);
  return text;
}

rm_code rm_fail(rm_error *err, rm_code code, const char *format, ...) {
  if (!err) return code;
  va_list args, again;
  va_start(args, format);
  va_copy(again, args);
  char *message = extended(NULL, 0, format, args);
  if (!message) {
    char fixed[sizeof err->fixed];
    vsnprintf(fixed, sizeof fixed, format, again);
    const size_t length = strlen(fixed);
    if (length == sizeof fixed - 1) fixed[utf8_cut(fixed, length - 1)] = 0;
    memcpy(err->fixed, fixed, sizeof fixed);
  }
  va_end(again);
  va_end(args);
  rm_free(err->message);
  err->message = message;
  err->code = code;
  return code;
}

rm_code rm_no_memory(rm_error *err, const char *what, size_t bytes) {
  return rm_fail(err, RM_E_MEMORY, "memory: expected %s for %s, got none",
                 bytes ? rm_say_bytes((double)bytes).text : "room", what);
}

rm_code rm_check_range(rm_error *err, rm_code code, const char *name, int64_t value, int64_t low,
                       int64_t high) {
  if (value >= low && value <= high) return RM_OK;
  return rm_fail(err, code, "%s: expected %lld to %lld, got %lld", name, (long long)low,
                 (long long)high, (long long)value);
}

void rm_error_append(rm_error *err, const char *format, ...) {
  if (!err || !err->message) return;
  const size_t used = strlen(err->message);
  const int cut = used > MESSAGE_MAX - sizeof ellipsis &&
                  strcmp(err->message + used - (sizeof ellipsis - 1), ellipsis) == 0;
  if (cut || used > MESSAGE_MAX) return;
  va_list args;
  va_start(args, format);
  char *message = extended(err->message, used, format, args);
  va_end(args);
  if (!message) return; // keeps the message as it is
  rm_free(err->message);
  err->message = message;
}

rm_size_text rm_say_bytes(double bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
  int unit = 0;
  for (; unit < 3 && (bytes >= 1024 || bytes <= -1024); unit++) bytes /= 1024;
  rm_size_text size;
  snprintf(size.text, sizeof size.text, unit ? "%.2f %s" : "%.0f %s", bytes, units[unit]);
  return size;
}

const char *rm_error_message(const rm_error *err) {
  if (!err) return "";
  if (err->message) return err->message;
  return err->fixed[0] ? err->fixed : rm_code_name(err->code);
}

void rm_error_clear(rm_error *err) {
  if (!err) return;
  rm_free(err->message);
  *err = (rm_error)RM_ERROR_INIT;
}

static const char *const code_names[RM_N_CODE] = {
    [RM_OK] = "OK",
    [RM_E_CONFIG] = "ConfigError",
    [RM_E_REQUEST] = "RequestError",
    [RM_E_STATE] = "StateError",
    [RM_E_NOT_SYNCED] = "NotSyncedError",
    [RM_E_VERSION] = "VersionError",
    [RM_E_MISSING_KEY] = "MissingKeyError",
    [RM_E_UNEXPECTED_KEY] = "UnexpectedKeyError",
    [RM_E_DUPLICATE_KEY] = "DuplicateKeyError",
    [RM_E_TIED_WEIGHT] = "TiedWeightError",
    [RM_E_SHAPE] = "ShapeError",
    [RM_E_DTYPE] = "DTypeError",
    [RM_E_LAYOUT] = "LayoutError",
    [RM_E_UNSUPPORTED_TENSOR] = "UnsupportedTensorError",
    [RM_E_NONFINITE] = "NonFiniteError",
    [RM_E_LIMIT] = "LimitError",
    [RM_E_INCOMPLETE_SYNC] = "IncompleteSyncError",
    [RM_E_CAPACITY] = "CapacityError",
    [RM_E_NUMERICS] = "NumericsError",
    [RM_E_MEMORY] = "MemoryError",
    [RM_E_MESH_MISMATCH] = "MeshMismatchError",
    [RM_E_COLLECTIVE_MISMATCH] = "CollectiveMismatchError",
    [RM_E_COLLECTIVE_TIMEOUT] = "CollectiveTimeoutError",
    [RM_E_RANK_LOST] = "RankLostError",
    [RM_E_SYNC_ABORTED] = "SyncAbortedError",
    [RM_E_AUTH] = "AuthError",
    [RM_E_DEVICE] = "DeviceError",
};

const char *rm_code_name(rm_code code) {
  return (unsigned)code < RM_N_CODE && code_names[code] ? code_names[code] : "Error";
}
