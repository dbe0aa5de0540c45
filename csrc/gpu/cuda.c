// cuda.c: opens CUDA devices and CUDA IPC loans; see gpu.h.
#include <dlfcn.h>
#include <string.h>

#include "cuda/rm_cuda.h"
#include "gpu/gpu.h"

// Sets the function pointer at `slot` to a function of the library.
static rm_code find(const char *library, const char *name, void *slot, rm_error *err) {
  void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) return rm_fail(err, RM_E_CONFIG, "the CUDA library cannot be loaded: %s", dlerror());
  void *function = dlsym(handle, name);   // the library stays loaded
  if (!function)
    return rm_fail(err, RM_E_CONFIG, "%s has no %s: expected the CUDA library of the same build",
                   library, name);
  memcpy(slot, &function, sizeof function);
  return RM_OK;
}

// Declares `call`, a function of the library by its name, and `code`, the result of finding it.
#define FIND(name) \
  __typeof__(&(name)) call = NULL; \
  rm_code code = find(library, #name, &call, err)

rm_code rm_cuda_count(const char *library, int *count, rm_error *err) {
  FIND(rm_cuda_devices);
  if (!code) *count = call();
  return code;
}

rm_code rm_cuda_kernels(const char *library, const char *family, const rm_kernels **out,
                        rm_error *err) {
  const rm_kernels *(*tables[])(void) = {NULL, NULL};
  rm_code code = find(library, "rm_kernels_cuda", &tables[0], err);
  if (!code) code = find(library, "rm_kernels_cuda_mma", &tables[1], err);
  *out = NULL;
  for (size_t i = 0; !code && i < sizeof tables / sizeof *tables && !*out; i++)
    if (!family || strcmp(tables[i]()->family, family) == 0) *out = tables[i]();
  if (code || *out) return code;
  return rm_fail(err, RM_E_CONFIG, "isa: expected a CUDA family, %s or %s, got \"%.40s\"",
                 tables[0]()->family, tables[1]()->family, family);
}

rm_code rm_cuda_device(const char *library, int ordinal, const char *family, rm_device *out,
                       rm_error *err) {
  const rm_kernels *kernels = NULL;
  char why[256];
  int count;
  FIND(rm_cuda_open);
  if (!code) code = rm_cuda_count(library, &count, err);
  if (!code) code = rm_cuda_kernels(library, family, &kernels, err);
  if (code) return code;
  if (count == -1)
    return rm_fail(err, RM_E_CONFIG, "device=\"cuda\": expected an NVIDIA driver, got none");
  if (count < 0)
    return rm_fail(
        err, RM_E_CONFIG,
        "device=\"cuda\": expected an NVIDIA driver 580 or later (CUDA 13), got an older one");
  if (ordinal < 0 || ordinal >= count)
    return rm_fail(err, RM_E_CONFIG, "device: expected one of the driver's %d devices, got cuda:%d",
                   count, ordinal);
  const rm_device_opened opened = call(ordinal, kernels, out, why);
  if (opened == RM_DEVICE_OPENED) return RM_OK;
  code = opened == RM_DEVICE_NOT_FOUND ? RM_E_CONFIG
         : opened == RM_DEVICE_FULL    ? RM_E_CAPACITY
                                       : RM_E_DEVICE;
  return rm_fail(err, code, "device=\"cuda:%d\": %s", ordinal, why);
}

// ------------------------------------------------------------------------------ between processes
rm_code rm_cuda_make_loan(const char *library, const rm_device *device, const void *address,
                          rm_device_loan *out, rm_error *err) {
  FIND(rm_cuda_lend);
  if (code) return code;
  const int saved = device->enter(device->self);
  const char *why = call(device->ordinal, address, out);
  device->leave(device->self, saved);
  return why ? rm_fail(err, RM_E_UNSUPPORTED_TENSOR, "%s", why) : RM_OK;
}

rm_code rm_cuda_bus_id(const char *library, int ordinal, char id[32], rm_error *err) {
  FIND(rm_cuda_bus);
  if (code) return code;
  const char *why = call(ordinal, id, 32);
  return why ? rm_fail(err, RM_E_CONFIG, "cuda:%d: %s", ordinal, why) : RM_OK;
}

rm_code rm_cuda_ordinal(const char *library, const char *bus, int *ordinal, rm_error *err) {
  FIND(rm_cuda_find);
  if (code) return code;
  const char *why = call(bus, ordinal);
  return why ? rm_fail(err, RM_E_CONFIG, "GPU %.31s is not among the devices of this process: %s",
                       bus, why)
             : RM_OK;
}

rm_code rm_cuda_open_loan(const char *library, const rm_device *device, rm_device_loan *loan,
                          rm_error *err) {
  FIND(rm_cuda_borrow);
  if (code) return code;
  const int saved = device->enter(device->self);
  const char *why = call(loan);
  device->leave(device->self, saved);
  return why ? rm_fail(err, RM_E_DEVICE, "%s: memory of another process: %s", device->name, why)
             : RM_OK;
}

rm_code rm_cuda_close_loan(const char *library, const rm_device *device, void *block,
                           rm_error *err) {
  FIND(rm_cuda_give_back);
  if (code) return code;
  const int saved = device->enter(device->self);
  const char *why = call(block);
  device->leave(device->self, saved);
  return why ? rm_fail(err, RM_E_DEVICE, "%s: %s", device->name, why) : RM_OK;
}
