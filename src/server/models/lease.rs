//! Uses of a model: as long as there is one, the model stays.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::Models;
use crate::server::service::Service;

/// A loaded model that stays as long as this does.
pub struct Lease {
    /// `None` only while this is dropped.
    service: Option<Arc<Service>>,
    models: Arc<Models>,
    id: usize,
    /// The number of the load, among all.
    pub load: u64,
    /// Whether the model is used, or looked at.
    is_use: bool,
}

impl Lease {
    /// The model's number.
    pub fn id(&self) -> usize {
        self.id
    }

    /// Keeps the model for this time after its last use; `None` is for ever.
    pub fn keep(&self, keep: Option<Duration>) {
        self.models.keep(self.id, keep);
    }

    /// The lease of a model that the roster has counted.
    pub(super) fn new(
        models: &Arc<Models>,
        id: usize,
        service: Arc<Service>,
        load: u64,
        is_use: bool,
    ) -> Arc<Lease> {
        Arc::new(Lease { service: Some(service), models: models.clone(), id, load, is_use })
    }
}

impl Deref for Lease {
    type Target = Service;

    fn deref(&self) -> &Service {
        self.service.as_ref().expect("it is there until the end")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Who unloads the model has it alone once the roster says so.
        drop(self.service.take());
        let used = self.is_use.then(|| self.models.now());
        self.models.lock().roster.give(self.id, used);
        self.models.work.notify_one();
    }
}

/// A request that waits for a model, until this is dropped.
pub(super) struct Waiting {
    models: Arc<Models>,
    id: usize,
}

impl Waiting {
    /// The wait of a request that the roster has counted.
    pub fn new(models: &Arc<Models>, id: usize) -> Waiting {
        Waiting { models: models.clone(), id }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.models.lock().roster.end_wait(self.id);
        self.models.work.notify_one();
    }
}
