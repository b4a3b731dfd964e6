/* A stand-in for libnvidia-ml.so.1: GPUs whose behaviour environment variables script.
 *
 *   FAKE_NVML_COUNT     how many GPUs (default 1, at most 8)
 *   FAKE_NVML_INIT      what nvmlInitWithFlags returns (default 0)
 *   FAKE_NVML_POWER     watts over time, "100@0,500@2.5": from a second on, counted from the start of NVML
 *   FAKE_NVML_THROTTLE  the mask of clock event reasons over time, in the same form, decimal
 *   FAKE_NVML_RESET     the second at which the energy counter starts again at 0
 *   FAKE_NVML_FAIL      "field:gpu:code:from:to,...": calls number from..to (counted per field and GPU, from 0, both
 *                       ends in) of a field return an error code; gpu -1 is every GPU. Fields: energy, power, util,
 *                       memory, clock, temperature, temperature_v, events, throttle, handle; all is every field,
 *                       counted by the energy calls
 *   FAKE_NVML_STALL     "n:ms": the n-th energy call of GPU 0 takes that long
 *   FAKE_NVML_MIG       1: GPU 0 is split, and has the slice MIG-0
 *   FAKE_NVML_MIXED     1: the GPUs are of different products
 *
 * Time is the host's monotonic clock, or what fake_nvml_set_ns says, once that was called.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOST 8
enum { ENERGY, POWER, UTIL, MEMORY, CLOCK, TEMPERATURE, TEMPERATURE_V, EVENTS, THROTTLE, HANDLE, FIELDS };
static const char *names[FIELDS] = {"energy",      "power",         "util",   "memory",   "clock",
                                    "temperature", "temperature_v", "events", "throttle", "handle"};
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

struct device { int index; int slice; int calls[FIELDS]; };
static struct device devices[MOST], slice_of_0;
static long long started_ns, set_ns = -1;

static long long now_ns(void) {
    struct timespec t;
    if (set_ns >= 0) return set_ns;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
void fake_nvml_set_ns(long long ns) { set_ns = ns; }

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

/* The value of a profile at a time, and its integral since 0. */
static double profile(const char *name, double otherwise, double until, double *integral) {
    const char *text = getenv(name);
    double value = otherwise, since = 0, sum = 0, next, at;
    int used;
    while (text && sscanf(text, "%lf@%lf%n", &next, &at, &used) == 2 && at <= until) {
        sum += value * (at - since);
        value = next;
        since = at;
        text += used;
        if (*text == ',') text++;
    }
    sum += value * (until - since);
    if (integral) *integral = sum;
    return value;
}

static double seconds(void) { return (now_ns() - started_ns) / 1e9; }

/* The error that this call is to return. */
static int called(struct device *d, int field) {
    const char *text = getenv("FAKE_NVML_FAIL");
    char name[32];
    int gpu, code, from, to, used, call = d->calls[field]++;
    while (text && sscanf(text, "%31[^:]:%d:%d:%d:%d%n", name, &gpu, &code, &from, &to, &used) == 5) {
        int all = !strcmp(name, "all") && field != HANDLE;
        int n = all ? d->calls[ENERGY] - 1 : call;
        int named = all || !strcmp(name, names[field]);
        if (named && (gpu == -1 || gpu == d->index) && n >= from && n <= to) return code;
        text += used;
        if (*text == ',') text++;
    }
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    started_ns = now_ns();
    memset(devices, 0, sizeof devices);
    for (int i = 0; i < MOST; i++) devices[i].index = i;
    memset(&slice_of_0, 0, sizeof slice_of_0);
    slice_of_0.slice = 1;
    return number("FAKE_NVML_INIT", OK);
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake"; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { snprintf(out, n, "999.1"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = number("FAKE_NVML_COUNT", 1); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, struct device **out) {
    if ((int)i >= number("FAKE_NVML_COUNT", 1)) return INVALID;
    *out = &devices[i];
    return called(&devices[i], HANDLE);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **out) {
    if (!number("FAKE_NVML_MIG", 0) || strcmp(uuid, "MIG-0")) return NOT_FOUND;
    *out = &slice_of_0;
    return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct device *d, struct device **out) {
    *out = &devices[d->index];
    return d->slice ? OK : INVALID;
}
int nvmlDeviceGetIndex(struct device *d, unsigned *out) { *out = d->index; return OK; }
int nvmlDeviceGetUUID(struct device *d, char *out, unsigned n) {
    snprintf(out, n, "GPU-%d0000000-0000-0000-0000-000000000000", d->index);
    return OK;
}
int nvmlDeviceGetName(struct device *d, char *out, unsigned n) {
    snprintf(out, n, "Fake GPU %d", number("FAKE_NVML_MIXED", 0) ? d->index : 0);
    return OK;
}
int nvmlDeviceGetMigMode(struct device *d, unsigned *now, unsigned *pending) {
    if (!number("FAKE_NVML_MIG", 0)) return NOT_SUPPORTED;
    *now = *pending = d->index == 0;
    return OK;
}

int nvmlDeviceGetTotalEnergyConsumption(struct device *d, unsigned long long *out) {
    int code = called(d, ENERGY), n, ms;
    double joules, before = 0, reset = 1e30;
    const char *text = getenv("FAKE_NVML_STALL");
    if (text && d->index == 0 && sscanf(text, "%d:%d", &n, &ms) == 2 && n == d->calls[ENERGY] - 1) {
        struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
        nanosleep(&t, NULL);
    }
    if ((text = getenv("FAKE_NVML_RESET"))) reset = atof(text);
    profile("FAKE_NVML_POWER", 100, seconds(), &joules);
    if (seconds() >= reset) profile("FAKE_NVML_POWER", 100, reset, &before);
    else before = -1000; /* what it counted before this start of NVML */
    *out = (unsigned long long)((joules - before) * 1000 + 0.5);
    return code;
}
int nvmlDeviceGetPowerUsage(struct device *d, unsigned *out) {
    *out = (unsigned)(profile("FAKE_NVML_POWER", 100, seconds(), NULL) * 1000 + 0.5);
    return called(d, POWER);
}
int nvmlDeviceGetUtilizationRates(struct device *d, unsigned *out) {
    out[0] = 80, out[1] = 30;
    return d->slice ? NOT_SUPPORTED : called(d, UTIL);
}
int nvmlDeviceGetMemoryInfo(struct device *d, unsigned long long *out) {
    out[0] = 24ULL << 30, out[1] = 14ULL << 30, out[2] = (d->slice ? 3ULL : 10ULL) << 30;
    return called(d, MEMORY);
}
int nvmlDeviceGetClockInfo(struct device *d, int type, unsigned *out) {
    *out = type == 1 ? 1980 : 2619;
    return called(d, CLOCK);
}
int nvmlDeviceGetTemperature(struct device *d, int sensor, unsigned *out) {
    (void)sensor;
    *out = 61;
    return called(d, TEMPERATURE);
}
int nvmlDeviceGetTemperatureV(struct device *d, int *out) { /* version, sensor, temperature */
    out[2] = 60;
    return called(d, TEMPERATURE_V);
}
static unsigned long long mask(void) {
    return (unsigned long long)profile("FAKE_NVML_THROTTLE", 0, seconds(), NULL);
}
int nvmlDeviceGetCurrentClocksEventReasons(struct device *d, unsigned long long *out) {
    *out = mask();
    return called(d, EVENTS);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *d, unsigned long long *out) {
    *out = mask();
    return called(d, THROTTLE);
}
