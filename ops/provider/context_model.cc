#include "provider/context_model.h"

#include <array>
#include <filesystem>
#include <utility>

#include "provider/embedded.h"

namespace ortolan::provider {
namespace {

constexpr const char* kOperator = "EPContext";
constexpr const char* kDomain = "com.microsoft";
constexpr const char* kFormat = "format ";
constexpr const char* kAdvice = ". Compile the original model again: create a session with ep.context_enable.";

constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

std::string ToBase64(std::span<const uint8_t> bytes) {
  std::string text;
  text.reserve(static_cast<size_t>(Base64Size(static_cast<int64_t>(bytes.size()))));
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t count = std::min<size_t>(3, bytes.size() - i);
    uint32_t bits = 0;
    for (size_t j = 0; j < 3; ++j) bits = bits << 8 | (j < count ? bytes[i + j] : 0);
    for (size_t j = 0; j < 4; ++j) text += j <= count ? kDigits[bits >> (18 - 6 * j) & 63] : '=';
  }
  return text;
}

// Throws OpError if the text is not the output of ToBase64.
std::vector<uint8_t> FromBase64(const std::string& text) {
  std::array<int8_t, 256> values;
  values.fill(-1);
  for (int8_t i = 0; i < 64; ++i) values[static_cast<uint8_t>(kDigits[i])] = i;
  const size_t end = text.find('=');
  const size_t digits = end == std::string::npos ? text.size() : end;
  if (text.size() % 4 != 0 || text.size() - digits > 2) throw OpError("its ep_cache_context is not valid Base64");
  std::vector<uint8_t> bytes;
  bytes.reserve(text.size() / 4 * 3);
  uint32_t bits = 0;
  for (size_t i = 0; i < digits; ++i) {
    const int8_t value = values[static_cast<uint8_t>(text[i])];
    if (value < 0) throw OpError("its ep_cache_context is not valid Base64");
    bits = bits << 6 | static_cast<uint32_t>(value);
    if (i % 4 != 0) bytes.push_back(static_cast<uint8_t>(bits >> (6 - i % 4 * 2)));
  }
  return bytes;
}

std::string IdText(uint64_t id) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "id %016llx", static_cast<unsigned long long>(id));
  return text.data();
}

// Return the path of the compiled model: that of the session, or ONNX Runtime's default.
std::string ContextPath(const ContextOptions& options, const std::string& model_path) {
  if (!options.path.empty()) return options.path;
  if (model_path.empty()) {
    throw OpError(
        "the compiled model has no path, because the model was not loaded from a file. Set the session's "
        "ep.context_file_path to the "
        "path of the compiled model, or ep.context_embed_mode to 1");
  }
  return model_path.substr(0, model_path.find_last_of('.')) + "_ctx.onnx";
}

// Return the path of the weights' file, such as "model_ctx_ortolan.bin" for "model_ctx.onnx".
std::filesystem::path BesideModel(const std::filesystem::path& path) {
  return path.parent_path() / (path.stem().string() + "_ortolan.bin");
}

// Throws OpError unless the path stays in the model's folder.
void CheckPath(const std::filesystem::path& path) {
  bool stays = path.has_filename() && path.is_relative();
  for (const std::filesystem::path& part : path) stays = stays && part != "..";
  if (!stays) throw OpError(ErrorText("its file is '", path.string(), "', expected a file in the model's folder"));
}

std::vector<const char*> NamesOf(const std::vector<Value>& values) {
  std::vector<const char*> names;
  for (const Value value : values) names.push_back(value == nullptr ? "" : value->name.c_str());
  return names;
}

class Attributes {
 public:
  explicit Attributes(const OrtApi& ort) : ort_(ort) {}
  ~Attributes() {
    for (OrtOpAttr* const attribute : all_) ort_.ReleaseOpAttr(attribute);
  }
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;

  void Int(const char* name, int64_t number) { Add(name, &number, ORT_OP_ATTR_INT, 1); }
  void String(const char* name, const std::string& text) {
    Add(name, text.c_str(), ORT_OP_ATTR_STRING, static_cast<int>(text.size()));
  }
  std::vector<OrtOpAttr*>& all() { return all_; }

 private:
  void Add(const char* name, const void* data, OrtOpAttrType type, int size) {
    OrtOpAttr* attribute = nullptr;
    Check(ort_, ort_.CreateOpAttr(name, data, size, type, &attribute));
    all_.push_back(attribute);
  }

  const OrtApi& ort_;
  std::vector<OrtOpAttr*> all_;
};

}  // namespace

const char* CompatibilityInfo() {
  static const std::string info = ErrorText(kFormat, kContextFormat, " (Ortolan ", ORTOLAN_VERSION, ")");
  return info.c_str();
}

OrtCompiledModelCompatibility CompatibilityOf(const std::string& info) {
  if (!info.starts_with(kFormat)) return OrtCompiledModelCompatibility_EP_NOT_APPLICABLE;
  const bool is_known = info.starts_with(ErrorText(kFormat, kContextFormat, " "));
  return is_known ? OrtCompiledModelCompatibility_EP_SUPPORTED_OPTIMAL : OrtCompiledModelCompatibility_EP_UNSUPPORTED;
}

bool IsContextNode(const Node& node) {
  return node.Is(kDomain, kOperator) && node.String("source", "") == kProviderName;
}

OrtNode* ContextModel::MakeNode(const Node& fused, const std::string& content, uint64_t id) const {
  const OrtApi& ort = *host_.ort;
  Attributes attributes(ort);
  attributes.Int("main_context", 1);
  attributes.Int("embed_mode", options_.embeds ? 1 : 0);
  attributes.String("ep_cache_context", content);
  attributes.String("ep_sdk_version", ErrorText("Ortolan ", ORTOLAN_VERSION));
  attributes.String("partition_name", fused.name());
  attributes.String("source", kProviderName);
  attributes.String("notes", IdText(id));
  const std::vector<const char*> inputs = NamesOf(fused.inputs()), outputs = NamesOf(fused.outputs());
  OrtNode* node = nullptr;
  // ONNX Runtime matches the new node to the fused node by name.
  Check(ort, ort.GetModelEditorApi()->CreateNode(kOperator, kDomain, fused.name().c_str(), inputs.data(), inputs.size(),
                                                 outputs.data(), outputs.size(), attributes.all().data(),
                                                 attributes.all().size(), &node));
  return node;
}

std::vector<OrtNode*> ContextModel::Write(std::span<const std::unique_ptr<GroupCompute>> groups,
                                          std::span<const OrtNode* const> fused, const std::string& model_path) const {
  const OrtApi& ort = *host_.ort;
  const auto release = [&](OrtNode* node) { ort.ReleaseNode(node); };
  std::vector<std::unique_ptr<OrtNode, decltype(release)>> nodes;
  std::vector<ContextWriter> files(options_.embeds ? groups.size() : 1);
  for (size_t i = 0; i < groups.size(); ++i) {
    ContextWriter& writer = options_.embeds ? files[i] : files.front();
    writer.BeginGroup(OrtModelGraph(host_, *fused[i]).node().name());
    groups[i]->Write(writer);
  }
  if (options_.embeds) {
    std::vector<int64_t> sizes;
    for (const ContextWriter& file : files) sizes.push_back(file.Size());
    CheckEmbedded(sizes);
    for (size_t i = 0; i < groups.size(); ++i) {
      nodes.emplace_back(MakeNode(OrtModelGraph(host_, *fused[i]).node(), ToBase64(files[i].Bytes()), files[i].Id()),
                         release);
    }
  } else {
    const std::filesystem::path path = BesideModel(ContextPath(options_, model_path));
    files.front().Save(path.string());
    for (const OrtNode* const one : fused) {
      nodes.emplace_back(MakeNode(OrtModelGraph(host_, *one).node(), path.filename().string(), files.front().Id()),
                         release);
    }
  }
  std::vector<OrtNode*> given;
  for (auto& node : nodes) given.push_back(node.release());
  return given;
}

std::shared_ptr<const ContextFile> ContextModel::FileOf(const OrtModelGraph& model, const std::string& model_path) {
  const Node& node = model.node();
  const std::string content = ReadText(host_, model.OrtNodeOf(node), "ep_cache_context");
  const int64_t embed_mode = node.Int("embed_mode", 1);
  if (embed_mode == 1) return ContextFile::Take(FromBase64(content), "ep_cache_context");
  if (embed_mode != 0) throw OpError(ErrorText("its embed_mode is ", embed_mode, ", expected 0 or 1"));
  CheckPath(content);
  // If the model was loaded from memory, the session may specify where it was stored.
  const std::filesystem::path model_file(model_path.empty() ? options_.path : model_path);
  if (model_file.empty()) {
    throw OpError(ErrorText("its file '", content,
                            "' is in the model's folder, but the model was not loaded from a file. Set the session's "
                            "ep.context_file_path to the path of the compiled model"));
  }
  const std::string path = (model_file.parent_path() / content).string();
  std::shared_ptr<const ContextFile>& file = files_[path];
  if (file == nullptr) file = ContextFile::Map(path);
  return file;
}

std::unique_ptr<GroupCompute> ContextModel::TryRead(const OrtModelGraph& model, const Node& fused,
                                                    const std::string& model_path, bool reproducible) {
  const Node& node = model.node();
  const std::shared_ptr<const ContextFile> file = FileOf(model, model_path);
  const std::string id = node.String("notes", "");
  if (id != IdText(file->id())) {
    throw OpError(ErrorText(file->Described(), ", has ", IdText(file->id()), ", expected ", id,
                            ": the file belongs to another model"));
  }
  try {
    return std::make_unique<GroupCompute>(host_, file, node.String("partition_name", ""), node, fused, reproducible);
  } catch (const OpError& error) {
    throw OpError(ErrorText(file->Described(), ": ", error.what()));
  }
}

std::unique_ptr<GroupCompute> ContextModel::Read(const OrtModelGraph& model, const Node& fused,
                                                 const std::string& model_path, bool reproducible) {
  const Node& node = model.node();
  if (options_.enabled) {
    throw OpError(ErrorText(node.Described(), " is compiled already. Leave out ep.context_enable"));
  }
  try {
    return TryRead(model, fused, model_path, reproducible);
  } catch (const OpError& error) {
    throw OpError(ErrorText(node.Described(), ": ", error.what(), kAdvice));
  } catch (const UnfitError& error) {
    throw OpError(ErrorText(node.Described(), ": ", error.what(), kAdvice));
  }
}

}  // namespace ortolan::provider
