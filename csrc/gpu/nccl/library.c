// library.c: see library.h.
#include "gpu/nccl/library.h"

#include <dlfcn.h>
#include <string.h>

rm_code rm_nccl_load(const char *path, rm_nccl *out, rm_error *err) {
  *out = (rm_nccl){0};
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE), *found;
  if (!library) return rm_fail(err, RM_E_CONFIG, "NCCL cannot be loaded: %s", dlerror());
  // ISO C cannot convert a void * to a function pointer.
#define LOAD(member, name, result, arguments) \
  if (!(found = dlsym(library, "nccl" #name))) \
    return rm_fail(err, RM_E_CONFIG, "expected NCCL 2.17.1 or later, got %s without nccl" #name, \
                   path); \
  memcpy(&out->member, &found, sizeof found);
  RM_NCCL_CALLS(LOAD)
#undef LOAD
  const int result = out->get_version(&out->version);
  if (result)
    return rm_fail(err, RM_E_CONFIG, "%s: expected a version from ncclGetVersion, got: %s", path,
                   out->error_string(result));
  if (out->version >= RM_NCCL_LEAST) return RM_OK;
  // Up to 2.8 the version is 1000·major + 100·minor + patch, from 2.9 on 10000·major + ….
  const int version = out->version, unit = version < 10000 ? 1000 : 10000;
  return rm_fail(err, RM_E_CONFIG, "expected NCCL 2.17.1 or later, got %d.%d.%d in %s",
                 version / unit, version % unit / 100, version % 100, path);
}
