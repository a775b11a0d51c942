//! What a download tells while it runs, and who may refuse it before its weights are fetched.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// What is told of a download while it runs.
#[derive(Clone, Copy, Debug)]
pub enum DownloadEvent<'a> {
    /// Everything but the weights is there, and these are about to be fetched.
    Planned(&'a DownloadPlan),
    /// A file begins: its name, and how many of all files are there already.
    File { name: &'a str, done: usize, files: usize },
    /// So much of the file is there, counting what an earlier attempt left.
    Bytes { done: u64, total: u64 },
    /// All files are there.
    Finished,
}

/// What is about to be fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DownloadPlan {
    /// `org/repo`, or an address.
    pub source: String,
    /// Where the files will be; config.json is there, if the source has one.
    pub folder: PathBuf,
    /// Files whose bytes are missing, and how many bytes are.
    pub files: usize,
    pub missing_bytes: u64,
    /// Bytes of all files with weights, those that are there included.
    pub weight_bytes: u64,
    /// Whether the weights are a GGUF file.
    pub is_gguf: bool,
}

type EventFunction = dyn Fn(DownloadEvent<'_>) + Send + Sync;
type ApprovalFunction = dyn Fn(&DownloadPlan) -> Result<(), String> + Send + Sync;

/// Called while a download runs.
#[derive(Clone)]
pub struct DownloadListener {
    event: Arc<EventFunction>,
    approval: Option<Arc<ApprovalFunction>>,
}

impl DownloadListener {
    pub fn new(listener: impl Fn(DownloadEvent<'_>) + Send + Sync + 'static) -> DownloadListener {
        DownloadListener { event: Arc::new(listener), approval: None }
    }
    /// The same listener, and a function that may refuse a download with a reason before weights are fetched.
    pub fn with_approval(
        self,
        approval: impl Fn(&DownloadPlan) -> Result<(), String> + Send + Sync + 'static,
    ) -> DownloadListener {
        DownloadListener { approval: Some(Arc::new(approval)), ..self }
    }
    #[cfg_attr(not(feature = "hub"), allow(dead_code, reason = "downloads only"))]
    pub(super) fn report_event(&self, event: DownloadEvent<'_>) {
        (self.event)(event);
    }
    /// Tells the plan, unless it is refused.
    #[cfg_attr(not(feature = "hub"), allow(dead_code, reason = "downloads only"))]
    pub(super) fn approve(&self, plan: &DownloadPlan) -> Result<(), String> {
        if let Some(approval) = &self.approval {
            approval(plan)?;
        }
        self.report_event(DownloadEvent::Planned(plan));
        Ok(())
    }
}

impl fmt::Debug for DownloadListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DownloadListener")
    }
}

/// Why nothing is downloaded, where nothing is.
pub(super) fn no_downloads() -> &'static str {
    match cfg!(feature = "hub") {
        true => "Downloads are off (--offline, HF_HUB_OFFLINE).",
        false => "This mlcc was built without downloads (cargo feature `hub`).",
    }
}
