// host LIBRARY MODEL [CLAIMS]: runs a model with one float input on Ortolan's execution provider, using plain ONNX
// Runtime 1.23 or later, and prints the shape and values of the first output. CLAIMS is a file to which the provider
// appends the nodes that it claims and those that it leaves to ONNX Runtime.
#include <onnxruntime_c_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kApi = 23, kMaxRank = 8 };  // 1.23: the first API that loads providers from libraries

static const OrtApi* ort;

static void fail(const char* text) {
  fprintf(stderr, "host: %s\n", text);
  exit(1);
}

static void check(OrtStatus* status) {
  if (status != NULL) fail(ort->GetErrorMessage(status));
}

// Creates session options with Ortolan's provider as the first choice.
static OrtSessionOptions* make_options(OrtEnv* env, const char* library, const char* claims) {
  check(ort->RegisterExecutionProviderLibrary(env, "ortolan", library));
  const OrtEpDevice* const* devices = NULL;
  size_t count = 0, i = 0;
  check(ort->GetEpDevices(env, &devices, &count));
  while (i < count && strcmp(ort->EpDevice_EpName(devices[i]), "OrtolanExecutionProvider") != 0) ++i;
  if (i == count) fail("the library has no OrtolanExecutionProvider");

  OrtSessionOptions* options = NULL;
  check(ort->CreateSessionOptions(&options));
  const char* const keys[] = {"claims_file"};
  const char* const values[] = {claims};
  check(ort->SessionOptionsAppendExecutionProvider_V2(options, env, &devices[i], 1, keys, values, claims != NULL));
  return options;
}

// Creates a tensor with the shape of the session's first input; dynamic dimensions become 2. *data holds its values.
static OrtValue* make_input(const OrtSession* session, float** data) {
  OrtTypeInfo* type = NULL;
  const OrtTensorTypeAndShapeInfo* tensor = NULL;
  enum ONNXTensorElementDataType element = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  int64_t shape[kMaxRank];
  size_t rank = 0, size = 1;
  check(ort->SessionGetInputTypeInfo(session, 0, &type));
  check(ort->CastTypeInfoToTensorInfo(type, &tensor));
  if (tensor != NULL) check(ort->GetTensorElementType(tensor, &element));
  if (element != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) fail("the model's first input is not a float tensor");
  check(ort->GetDimensionsCount(tensor, &rank));
  if (rank > kMaxRank) fail("the model's first input has too many dimensions");
  check(ort->GetDimensions(tensor, shape, rank));
  ort->ReleaseTypeInfo(type);
  for (size_t i = 0; i < rank; ++i) {
    if (shape[i] < 0) shape[i] = 2;
    if (shape[i] != 0 && size > SIZE_MAX / sizeof(float) / (size_t)shape[i])
      fail("the model's first input is too large");
    size *= (size_t)shape[i];
  }

  *data = malloc(size * sizeof(float) + 1);  // never 0 bytes
  if (*data == NULL) fail("not enough memory for the input");
  for (size_t i = 0; i < size; ++i) (*data)[i] = (float)(i % 7) / 4 - 0.75f;
  OrtMemoryInfo* memory = NULL;
  OrtValue* input = NULL;
  check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  check(ort->CreateTensorWithDataAsOrtValue(memory, *data, size * sizeof(float), shape, rank,
                                            ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &input));
  ort->ReleaseMemoryInfo(memory);
  return input;
}

static void print(const OrtValue* output) {
  OrtTensorTypeAndShapeInfo* info = NULL;
  enum ONNXTensorElementDataType element = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  int64_t shape[kMaxRank];
  size_t rank = 0, size = 0;
  const void* values = NULL;
  check(ort->GetTensorTypeAndShape(output, &info));
  check(ort->GetTensorElementType(info, &element));
  if (element != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) fail("the model's first output is not a float tensor");
  check(ort->GetDimensionsCount(info, &rank));
  if (rank > kMaxRank) fail("the model's first output has too many dimensions");
  check(ort->GetDimensions(info, shape, rank));
  check(ort->GetTensorShapeElementCount(info, &size));
  ort->ReleaseTensorTypeAndShapeInfo(info);
  check(ort->GetTensorData(output, &values));
  for (size_t i = 0; i < rank; ++i) printf("%lld ", (long long)shape[i]);
  printf("\n");
  for (size_t i = 0; i < size; ++i) printf("%.9g ", ((const float*)values)[i]);
  printf("\n");
}

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) {
    fprintf(stderr, "usage: host LIBRARY MODEL [CLAIMS]\n");
    return 2;
  }
  ort = OrtGetApiBase()->GetApi(kApi);
  if (ort == NULL) fail("this ONNX Runtime is older than 1.23");
  OrtEnv* env = NULL;
  OrtSession* session = NULL;
  OrtAllocator* allocator = NULL;
  char *input_name = NULL, *output_name = NULL;
  float* data = NULL;
  OrtValue* output = NULL;
  check(ort->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "host", &env));
  OrtSessionOptions* const options = make_options(env, argv[1], argc > 3 ? argv[3] : NULL);
  check(ort->CreateSession(env, argv[2], options, &session));
  check(ort->GetAllocatorWithDefaultOptions(&allocator));
  check(ort->SessionGetInputName(session, 0, allocator, &input_name));
  check(ort->SessionGetOutputName(session, 0, allocator, &output_name));
  OrtValue* const input = make_input(session, &data);
  const char* const inputs[] = {input_name};
  const char* const outputs[] = {output_name};
  check(ort->Run(session, NULL, inputs, (const OrtValue* const[]){input}, 1, outputs, 1, &output));
  print(output);

  ort->ReleaseValue(output);
  ort->ReleaseValue(input);
  free(data);
  check(ort->AllocatorFree(allocator, output_name));
  check(ort->AllocatorFree(allocator, input_name));
  ort->ReleaseSession(session);
  ort->ReleaseSessionOptions(options);
  check(ort->UnregisterExecutionProviderLibrary(env, "ortolan"));  // only after all sessions are released
  ort->ReleaseEnv(env);
  return 0;
}
