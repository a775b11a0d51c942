mod builder;
mod checks;
mod mapping;
